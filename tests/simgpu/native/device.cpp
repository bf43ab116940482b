// What a program can ask about the device, and the texts of errors.
#include <cstdio>

#include "sim.h"

using namespace sim;

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t sim::cupti::Call::say(cudaError_t error) {
  result = error;
  if (error != cudaSuccess) last_error = error;
  return error;
}

CUDA cudaGetLastError() {
  RUNTIME(cudaGetLastError, 3020);
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
CUDA cudaPeekAtLastError() {
  RUNTIME(cudaPeekAtLastError, 3020);
  return last_error;
}

struct Named {
  cudaError_t error;
  const char *name, *text;
};
static const Named kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
};
static const Named& named(cudaError_t error) {
  static const Named other = {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"};
  for (auto& one : kErrors)
    if (one.error == error) return one;
  return other;
}
EXPORT const char* cudaGetErrorName(cudaError_t error) { return named(error).name; }
EXPORT const char* cudaGetErrorString(cudaError_t error) { return named(error).text; }

CUDA cudaGetDeviceCount(int* count) {
  RUNTIME(cudaGetDeviceCount, 3020);
  *count = device_count();
  if (state().forked) return call.say(cudaErrorInitializationError);
  return call.say(*count ? cudaSuccess : cudaErrorNoDevice);
}
CUDA cudaGetDevice(int* device) {
  RUNTIME(cudaGetDevice, 3020);
  *device = current_device;
  return call.say(cudaSuccess);
}
CUDA cudaSetDevice(int device) {
  RUNTIME(cudaSetDevice, 3020);
  if (device < 0 || device >= device_count()) return call.say(cudaErrorInvalidDevice);
  current_device = device;
  ON_DEVICE;
  return call.say(cudaSuccess);
}
CUDA cudaDriverGetVersion(int* version) {
  RUNTIME(cudaDriverGetVersion, 3020);
  *version = 13000;
  return call.say(cudaSuccess);
}
CUDA cudaRuntimeGetVersion(int* version) {
  RUNTIME(cudaRuntimeGetVersion, 3020);
  *version = 13000;
  return call.say(cudaSuccess);
}

// Those of an H100 SXM, as far as torch and Triton ask.
static cudaDeviceProp properties_of(int device) {
  cudaDeviceProp p{};
  snprintf(p.name, sizeof p.name, "%s", text_setting("NAME").c_str());
  int physical = physical_device(device);
  for (int i = 0; i < 16; ++i) p.uuid.bytes[i] = char(kFirstOfUuid + physical + i);
  p.totalGlobalMem = size_t(setting("MEMORY"));
  p.sharedMemPerBlock = 49152;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.memPitch = 2147483647;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.totalConstMem = 65536;
  p.major = 9;
  p.textureAlignment = 512;
  p.texturePitchAlignment = 32;
  p.multiProcessorCount = 132;
  p.pciBusID = 1 + physical;
  p.asyncEngineCount = 3;
  p.memoryBusWidth = 5120;
  p.l2CacheSize = 50 << 20;
  p.persistingL2CacheMaxSize = 32 << 20;
  p.accessPolicyMaxWindowSize = 134213632;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.sharedMemPerMultiprocessor = 233472;
  p.sharedMemPerBlockOptin = 232448;
  p.reservedSharedMemPerBlock = 1024;
  p.canMapHostMemory = p.concurrentKernels = p.ECCEnabled = p.unifiedAddressing = p.streamPrioritiesSupported = 1;
  p.globalL1CacheSupported = p.localL1CacheSupported = p.managedMemory = p.computePreemptionSupported = 1;
  p.canUseHostPointerForRegisteredMem = p.cooperativeLaunch = p.hostRegisterSupported = 1;
  p.memoryPoolsSupported = p.clusterLaunch = 1;
  return p;
}
CUDA cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  RUNTIME(cudaGetDeviceProperties, 12000);
  if (device < 0 || device >= device_count()) return call.say(cudaErrorInvalidDevice);
  *properties = properties_of(device);
  return call.say(cudaSuccess);
}
int sim::attribute_of(int attribute, int device) {
  auto p = properties_of(device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return p.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimZ:
      return p.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX:
      return p.maxGridSize[0];
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return p.maxGridSize[1];
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return int(p.sharedMemPerBlock);
    case cudaDevAttrTotalConstantMemory:
      return int(p.totalConstMem);
    case cudaDevAttrWarpSize:
      return p.warpSize;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return p.regsPerBlock;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return p.memoryBusWidth;
    case cudaDevAttrTextureAlignment:
      return int(p.textureAlignment);
    case cudaDevAttrMultiProcessorCount:
      return p.multiProcessorCount;
    case cudaDevAttrL2CacheSize:
      return p.l2CacheSize;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return p.maxThreadsPerMultiProcessor;
    case cudaDevAttrAsyncEngineCount:
      return p.asyncEngineCount;
    case cudaDevAttrComputeCapabilityMajor:
      return p.major;
    case cudaDevAttrComputeCapabilityMinor:
      return p.minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return int(p.sharedMemPerMultiprocessor);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return int(p.sharedMemPerBlockOptin);
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return p.maxBlocksPerMultiProcessor;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return int(p.reservedSharedMemPerBlock);
    case cudaDevAttrPciBusId:
      return p.pciBusID;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrGpuOverlap:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrClusterLaunch:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrEccEnabled:
      return 1;
    default:
      return 0;
  }
}
CUDA cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  RUNTIME(cudaDeviceGetAttribute, 5000);
  if (device < 0 || device >= device_count()) return call.say(cudaErrorInvalidDevice);
  *value = attribute_of(attribute, device);
  return call.say(cudaSuccess);
}
CUDA cudaDeviceGetPCIBusId(char* text, int size, int device) {
  RUNTIME(cudaDeviceGetPCIBusId, 4010);
  if (device < 0 || device >= device_count()) return call.say(cudaErrorInvalidDevice);
  snprintf(text, size, "0000:%02X:00.0", physical_device(device) + 1);
  return call.say(cudaSuccess);
}
CUDA cudaDeviceCanAccessPeer(int* value, int one, int other) {
  RUNTIME(cudaDeviceCanAccessPeer, 4000);
  *value = one != other;
  return call.say(cudaSuccess);
}
CUDA cudaDeviceEnablePeerAccess(int, unsigned) {
  RUNTIME(cudaDeviceEnablePeerAccess, 4000);
  return call.say(cudaSuccess);
}
CUDA cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RUNTIME(cudaDeviceGetStreamPriorityRange, 5050);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return call.say(cudaSuccess);
}
