// Kernels: how nvcc's code registers and launches them.
#include <algorithm>

#include "sim.h"

using namespace sim;

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

int blocks_of(int threads) { return std::clamp(2048 / std::max(threads, 1), 1, 32); }
}  // namespace

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterHostVar(void**, const char*, char*, size_t) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                   dim3*, int*) {
  auto* kernel = new Kernel;
  kernel->name = name;
  LOCKED;
  state().by_host[host] = kernel;
  state().kernels.insert(kernel);
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
CUDA __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return cudaErrorMissingConfiguration;
  auto& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
CUDA __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(kernel_of(function));
  return *kernel ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}
CUDA __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                        cudaStream_t stream) {
  RUNTIME(cudaLaunchKernel, 7000);
  return call.say(
      launch(stream, reinterpret_cast<Kernel*>(kernel), grid, block, shared, call.correlation, arguments));
}
CUDA cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                      cudaStream_t stream) {
  RUNTIME(cudaLaunchKernel, 7000);
  return call.say(launch(stream, kernel_of(function), grid, block, shared, call.correlation, arguments));
}
CUDA cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared,
                                 cudaStream_t stream) {
  RUNTIME(cudaLaunchCooperativeKernel, 9000);
  return call.say(launch(stream, kernel_of(function), grid, block, shared, call.correlation));
}
CUDA cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  RUNTIME(cudaLaunchKernelExC, 11060);
  return call.say(launch(config->stream, kernel_of(function), config->gridDim, config->blockDim,
                         config->dynamicSmemBytes, call.correlation));
}
CUDA cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  RUNTIME(cudaFuncGetAttributes, 3020);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return call.say(cudaSuccess);
}
CUDA cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  RUNTIME(cudaFuncSetAttribute, 9000);
  return call.say(cudaSuccess);
}
CUDA cudaFuncGetName(const char** name, const void* function) {
  RUNTIME(cudaFuncGetName, 12030);
  auto* kernel = kernel_of(function);
  if (!kernel) return call.say(cudaErrorInvalidDeviceFunction);
  *name = kernel->name.c_str();
  return call.say(cudaSuccess);
}
CUDA cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  RUNTIME(cudaKernelSetAttributeForDevice, 12060);
  return call.say(cudaSuccess);
}
CUDA cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessor, 6050);
  *blocks = blocks_of(threads);
  return call.say(cudaSuccess);
}
CUDA cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t, unsigned) {
  RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 7000);
  *blocks = blocks_of(threads);
  return call.say(cudaSuccess);
}
CUDA cudaProfilerStart() {
  RUNTIME(cudaProfilerStart, 4000);
  return call.say(cudaSuccess);
}
CUDA cudaProfilerStop() {
  RUNTIME(cudaProfilerStop, 4000);
  return call.say(cudaSuccess);
}
