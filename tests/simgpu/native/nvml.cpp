// NVML: what torch.cuda and tools ask of it. It sees all devices, whatever CUDA_VISIBLE_DEVICES says.
#include <cstdio>

#include "sim.h"

using namespace sim;
#define NVML EXPORT int

namespace {

constexpr int kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3;

struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;  // percent
};

void* handle_of(int device) { return reinterpret_cast<void*>(uintptr_t(device + 1)); }
int device_of(void* handle) { return int(uintptr_t(handle)) - 1; }

}  // namespace

NVML nvmlInit_v2() { return kSuccess; }
NVML nvmlInit() { return kSuccess; }
NVML nvmlInitWithFlags(unsigned) { return kSuccess; }
NVML nvmlShutdown() { return kSuccess; }
EXPORT const char* nvmlErrorString(int error) { return error ? "an error of the simulated NVML" : "Success"; }

NVML nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "580.00");
  return kSuccess;
}
NVML nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}
NVML nvmlDeviceGetCount_v2(unsigned* count) {
  *count = all_devices();
  return kSuccess;
}
NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (int(index) >= all_devices()) return kInvalidArgument;
  *device = handle_of(index);
  return kSuccess;
}
NVML nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** device) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || int(bus) > all_devices()) return kInvalidArgument;
  *device = handle_of(bus - 1);
  return kSuccess;
}
NVML nvmlDeviceGetName(void*, char* text, unsigned size) {
  snprintf(text, size, "%s", text_setting("NAME").c_str());
  return kSuccess;
}
NVML nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  snprintf(text, size, "%s", uuid_of(device_of(device)).c_str());
  return kSuccess;
}
NVML nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return kSuccess;
}
NVML nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  LOCKED;
  memory->total = setting("MEMORY");
  memory->used = used_bytes_of_physical(device_of(handle));
  memory->free = memory->total - memory->used;
  return kSuccess;
}
NVML nvmlDeviceGetUtilizationRates(void*, Utilization* utilization) {
  *utilization = {50, 10};
  return kSuccess;
}
NVML nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  *celsius = 40;
  return kSuccess;
}
NVML nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 350000;
  return kSuccess;
}
NVML nvmlDeviceGetClockInfo(void*, int, unsigned* megahertz) {
  *megahertz = 1980;
  return kSuccess;
}
NVML nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
NVML nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
NVML nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
// Leaves the state at 0, which is: not supported.
NVML nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kSuccess; }
