// The driver, as far as PyTorch, Triton and tools call it. Memory that is mapped stands in memory.cpp.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "sim.h"

using namespace sim;
#define CU EXPORT CUresult
#define DRIVER(name) cupti::Call call(CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_##name)

namespace {

// The errors of the runtime have the numbers of the driver's.
CUresult say(cupti::Call& call, cudaError_t error) {
  call.result = error;
  return CUresult(error);
}

bool exists(CUdevice device) { return device >= 0 && device < device_count(); }

// A context stands for its device. That of a thread is that of its device, as soon as the device was used.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(uintptr_t(0xc0 + device)); }
int device_of(CUcontext context) { return int(uintptr_t(context) - 0xc0); }
thread_local std::vector<int> pushed;

CUcontext current_context() {
  LOCKED;
  return state().context[current_device] ? context_of(current_device) : nullptr;
}

CUresult load(CUmodule* module) {
  *module = reinterpret_cast<CUmodule>(new int(0));
  return CUDA_SUCCESS;
}

Kernel* kernel_of(CUfunction function) { return reinterpret_cast<Kernel*>(function); }

}  // namespace

CU cuInit(unsigned) {
  if (state().forked) return CUDA_ERROR_NOT_INITIALIZED;
  return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
CU cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

// ---- devices

CU cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
CU cuDeviceGet(CUdevice* device, int index) {
  if (!exists(index)) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}
CU cuDeviceGetName(char* text, int size, CUdevice device) {
  cudaDeviceProp properties;
  if (auto error = cudaGetDeviceProperties(&properties, device)) return CUresult(error);
  snprintf(text, size, "%s", properties.name);
  return CUDA_SUCCESS;
}
CU cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  cudaDeviceProp properties;
  if (auto error = cudaGetDeviceProperties(&properties, device)) return CUresult(error);
  memcpy(uuid->bytes, properties.uuid.bytes, sizeof uuid->bytes);
  return CUDA_SUCCESS;
}
CU cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = size_t(setting("MEMORY"));
  return CUDA_SUCCESS;
}
CU cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute_of(attribute, device);
  return CUDA_SUCCESS;
}

// ---- contexts

CU cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  LOCKED;
  *flags = 0;
  *active = state().context[device];
  return CUDA_SUCCESS;
}
CU cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  LOCKED;
  int before = std::exchange(current_device, device);
  auto error = use_device();
  current_device = before;
  *context = context_of(device);
  return CUresult(error);
}
CU cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CU cuCtxGetCurrent(CUcontext* context) {
  *context = current_context();
  return CUDA_SUCCESS;
}
CU cuCtxSetCurrent(CUcontext context) {
  if (context) current_device = device_of(context);
  return CUDA_SUCCESS;
}
CU cuCtxPushCurrent_v2(CUcontext context) {
  pushed.push_back(current_device);
  return cuCtxSetCurrent(context);
}
CU cuCtxPopCurrent_v2(CUcontext* context) {
  if (pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_of(current_device);
  current_device = pushed.back();
  pushed.pop_back();
  return CUDA_SUCCESS;
}
CU cuCtxGetDevice(CUdevice* device) {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current_device;
  return CUDA_SUCCESS;
}
CU cuCtxSynchronize() { return CUresult(cudaDeviceSynchronize()); }
CU cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(cudaError_t(error));
  return CUDA_SUCCESS;
}
CU cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(cudaError_t(error));
  return CUDA_SUCCESS;
}

// ---- kernels, as Triton loads and launches them

CU cuModuleLoadData(CUmodule* module, const void*) { return load(module); }
CU cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) { return load(module); }
CU cuModuleLoad(CUmodule* module, const char*) { return load(module); }
CU cuModuleUnload(CUmodule module) {
  delete reinterpret_cast<int*>(module);
  return CUDA_SUCCESS;
}
CU cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  LOCKED;
  *function = reinterpret_cast<CUfunction>(named_kernel(name));
  return CUDA_SUCCESS;
}
CU cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}
CU cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CU cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CU cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  *blocks = std::max(1, 2048 / std::max(1, threads));
  return CUDA_SUCCESS;
}
CU cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 16;
  return CUDA_SUCCESS;
}
CU cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                  unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void**, void**) {
  DRIVER(cuLaunchKernel);
  if (is_past_operators(kernel_of(function))) return say(call, cudaErrorNotSupported);
  return say(call, launch(stream, kernel_of(function), dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z),
                          shared, call.correlation));
}
CU cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void**) {
  DRIVER(cuLaunchCooperativeKernel);
  if (is_past_operators(kernel_of(function))) return say(call, cudaErrorNotSupported);
  return say(call, launch(stream, kernel_of(function), dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z),
                          shared, call.correlation));
}
CU cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  DRIVER(cuLaunchKernelEx);
  if (is_past_operators(kernel_of(function))) return say(call, cudaErrorNotSupported);
  return say(call,
             launch(config->hStream, kernel_of(function), dim3(config->gridDimX, config->gridDimY, config->gridDimZ),
                    dim3(config->blockDimX, config->blockDimY, config->blockDimZ), config->sharedMemBytes,
                    call.correlation));
}
CU cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                          const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                          CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  return CUDA_SUCCESS;
}

// ---- memory and streams

CU cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, reinterpret_cast<void*>(pointer));
  if (found.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(value) = pointer;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = found.type == cudaMemoryTypeHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = found.device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = context_of(found.device);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}
CU cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  LOCKED;
  uintptr_t start;
  auto* found = allocation_of(reinterpret_cast<void*>(pointer), &start);
  if (!found) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = start;
  if (bytes) *bytes = found->size;
  return CUDA_SUCCESS;
}
CU cuStreamSynchronize(CUstream stream) { return CUresult(cudaStreamSynchronize(stream)); }
CU cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  return CUresult(cudaMalloc(reinterpret_cast<void**>(pointer), bytes));
}
CU cuMemFree_v2(CUdeviceptr pointer) { return CUresult(cudaFree(reinterpret_cast<void*>(pointer))); }
CU cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return CUresult(cudaMemcpy(reinterpret_cast<void*>(to), from, bytes, cudaMemcpyHostToDevice));
}
CU cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return CUresult(cudaMemcpy(to, reinterpret_cast<void*>(from), bytes, cudaMemcpyDeviceToHost));
}

// ---- functions by name

static void* function_named(const char* name) {
  static void* self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&cuInit), &info);
    return dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  }();
  for (const char* suffix : {"_v3", "_v2", ""})
    if (void* found = dlsym(self, (std::string(name) + suffix).c_str())) return found;
  missing((std::string("entry point ") + name).c_str(), 0);
  return nullptr;
}
CUDA cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                      cudaDriverEntryPointQueryResult* result) {
  *function = function_named(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
CUDA cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                             cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
CU cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *function = function_named(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
