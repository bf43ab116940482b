// What c10 does when the CPU waits for a GPU, without one: it calls torch's trace hook before, warns, and waits.

#include <Python.h>

#include <c10/core/impl/GPUTrace.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <string>
#include <thread>

namespace {

struct Pretended {
  std::string what = "stream";
  double ms = 1;
  int repeat = 1;
  bool trace = true;
  bool warn = true;
  std::string vendor = "CUDA";
} now;

void wait_once() {
  const c10::impl::PyInterpreter* interpreter = now.trace ? c10::impl::GPUTrace::get_trace() : nullptr;
  if (interpreter != nullptr) {
    if (now.what == "stream") {
      (*interpreter)->trace_gpu_stream_synchronization(c10::kCUDA, 0);
    } else if (now.what == "event") {
      (*interpreter)->trace_gpu_event_synchronization(c10::kCUDA, 0);
    } else {
      (*interpreter)->trace_gpu_device_synchronization(c10::kCUDA);
    }
  }
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(now.ms));
}

void say() {
  if (now.warn) {
    TORCH_WARN("called a synchronizing ", now.vendor, " operation");
  }
}

PyObject* configure(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"what", "ms", "repeat", "trace", "warn", "vendor", nullptr};
  Pretended next;
  const char *what = "stream", *vendor = "CUDA";
  int trace = 1, warn = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|sdipps", const_cast<char**>(names), &what, &next.ms, &next.repeat,
                                   &trace, &warn, &vendor)) {
    return nullptr;
  }
  next.what = what, next.vendor = vendor, next.trace = trace, next.warn = warn;
  now = next;
  Py_RETURN_NONE;
}

// Waits where it is called; warnings reach Python when it returns.
bool waited() {
  HANDLE_TH_ERRORS
  {
    PyThreadState* state = PyEval_SaveThread();
    for (int count = 0; count < now.repeat; ++count) {
      say();
      wait_once();
    }
    PyEval_RestoreThread(state);
  }
  return true;
  END_HANDLE_TH_ERRORS_RET(false)
}

PyObject* wait(PyObject*, PyObject*) {
  if (!waited()) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* truth(PyObject*, PyObject*) { return waited() ? PyBool_FromLong(1) : nullptr; }

PyObject* number(PyObject*, PyObject*) { return waited() ? PyFloat_FromDouble(1) : nullptr; }

PyObject* text(PyObject*, PyObject*) { return waited() ? PyUnicode_FromString("1.0") : nullptr; }

// Waits in its backward, without any Python; warnings come when the backward pass is over.
struct Waiting : torch::autograd::Function<Waiting> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) { return tensor.clone(); }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    for (int count = 0; count < now.repeat; ++count) {
      say();
      wait_once();
    }
    return gradients;
  }
};

PyObject* in_backward(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(Waiting::apply(THPVariable_Unpack(tensor)));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"configure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(configure)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"wait", wait, METH_VARARGS, nullptr},
    {"truth", truth, METH_VARARGS, nullptr},
    {"number", number, METH_VARARGS, nullptr},
    {"text", text, METH_VARARGS, nullptr},
    {"in_backward", in_backward, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "gpuwaits", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_gpuwaits() { return PyModule_Create(&module); }
