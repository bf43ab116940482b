// Memory: that of the device is memory of the host, given out in the driver's units, so that a test can look into it.
#include <sys/mman.h>

#include <algorithm>

#include "sim.h"

namespace sim {

constexpr size_t kPage = 4096, kUnit = size_t(2) << 20;

bool reserve_bytes(size_t bytes, int device) {
  static Setting total("MEMORY");
  if (used_bytes(device) + bytes > size_t(total)) return false;
  state().used[device] += bytes;
  tell_used_bytes(device);
  return true;
}

void return_bytes(size_t bytes, int device) {
  state().used[device] -= bytes;
  tell_used_bytes(device);
}

cudaError_t allocate(void** pointer, size_t bytes, int kind) {
  static Setting largest("LARGEST_BYTES");
  *pointer = nullptr;
  if (!bytes) return cudaSuccess;
  bytes = (bytes + kPage - 1) & ~(kPage - 1);
  bool on_device = kind == cudaMemoryTypeDevice;
  if (on_device && largest && bytes > size_t(largest)) return cudaErrorMemoryAllocation;
  if (on_device && !reserve_bytes(bytes, current_device)) return cudaErrorMemoryAllocation;
  size_t room = bytes + kUnit;
  char* raw = static_cast<char*>(
      mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (raw == MAP_FAILED) return cudaErrorMemoryAllocation;
  char* aligned = reinterpret_cast<char*>((uintptr_t(raw) + kUnit - 1) & ~uintptr_t(kUnit - 1));
  if (aligned > raw) munmap(raw, aligned - raw);
  if (raw + room > aligned + bytes) munmap(aligned + bytes, raw + room - aligned - bytes);
  state().allocations[uintptr_t(aligned)] = {bytes, kind, current_device};
  *pointer = aligned;
  return cudaSuccess;
}

void free_allocation(void* pointer) {
  auto found = state().allocations.find(uintptr_t(pointer));
  if (found == state().allocations.end()) return;
  if (found->second.kind == cudaMemoryTypeDevice) return_bytes(found->second.size, found->second.device);
  munmap(pointer, found->second.size);
  state().allocations.erase(found);
}

const Allocation* allocation_of(const void* pointer, uintptr_t* base) {
  auto found = state().allocations.upper_bound(uintptr_t(pointer));
  if (found == state().allocations.begin()) return nullptr;
  --found;
  if (uintptr_t(pointer) >= found->first + found->second.size) return nullptr;
  if (base) *base = found->first;
  return &found->second;
}

static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool forbidden_in_capture() {
  auto& captures = state().captures;
  auto global = [](Capture* capture) { return capture->mode == cudaStreamCaptureModeGlobal; };
  if (thread_mode == cudaStreamCaptureModeRelaxed || std::none_of(captures.begin(), captures.end(), global))
    return false;
  for (auto* capture : captures) capture->invalid = true;
  return true;
}

}  // namespace sim

using namespace sim;

CUDA cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  RUNTIME(cudaThreadExchangeStreamCaptureMode, 10010);
  std::swap(*mode, thread_mode);
  return call.say(cudaSuccess);
}
CUDA cudaMalloc(void** pointer, size_t bytes) {
  RUNTIME(cudaMalloc, 3020);
  ON_DEVICE;
  NOT_CAPTURED;
  return call.say(allocate(pointer, bytes, cudaMemoryTypeDevice));
}
static void free_when_idle(const cupti::Call& call, Lock& lock, void* pointer) {
  drain(lock, current_device);
  log_wait("wait_free", call.start, state().last_end[current_device], call.correlation);
  free_allocation(pointer);
}
CUDA cudaFree(void* pointer) {
  RUNTIME(cudaFree, 3020);
  ON_DEVICE;
  if (!pointer) return call.say(cudaSuccess);
  NOT_CAPTURED;
  if (!state().allocations.count(uintptr_t(pointer))) return call.say(cudaErrorInvalidValue);
  free_when_idle(call, lock, pointer);
  return call.say(cudaSuccess);
}
CUDA cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  RUNTIME(cudaMallocAsync, 11020);
  ON_DEVICE;
  return call.say(allocate(pointer, bytes, cudaMemoryTypeDevice));
}
CUDA cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t, cudaStream_t) {
  RUNTIME(cudaMallocFromPoolAsync, 11020);
  ON_DEVICE;
  return call.say(allocate(pointer, bytes, cudaMemoryTypeDevice));
}
CUDA cudaFreeAsync(void* pointer, cudaStream_t stream) {
  RUNTIME(cudaFreeAsync, 11020);
  ON_DEVICE;
  Op op;
  op.kind = Kind::Free;
  op.dst = pointer;
  op.correlation = call.correlation;
  return call.say(enqueue(stream_of(stream), std::move(op)));
}
CUDA cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  RUNTIME(cudaHostAlloc, 3020);
  ON_DEVICE;
  NOT_CAPTURED;
  return call.say(allocate(pointer, bytes, cudaMemoryTypeHost));
}
CUDA cudaMallocHost(void** pointer, size_t bytes) {
  RUNTIME(cudaMallocHost, 3020);
  ON_DEVICE;
  return call.say(allocate(pointer, bytes, cudaMemoryTypeHost));
}
CUDA cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
  RUNTIME(cudaMallocManaged, 6000);
  ON_DEVICE;
  return call.say(allocate(pointer, bytes, cudaMemoryTypeManaged));
}
CUDA cudaFreeHost(void* pointer) {
  RUNTIME(cudaFreeHost, 3020);
  ON_DEVICE;
  if (pointer) free_when_idle(call, lock, pointer);
  return call.say(cudaSuccess);
}
CUDA cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  RUNTIME(cudaHostRegister, 4000);
  ON_DEVICE;
  state().allocations[uintptr_t(pointer)] = {bytes, cudaMemoryTypeHost, current_device};
  return call.say(cudaSuccess);
}
CUDA cudaHostUnregister(void* pointer) {
  RUNTIME(cudaHostUnregister, 4000);
  LOCKED;
  state().allocations.erase(uintptr_t(pointer));
  return call.say(cudaSuccess);
}
CUDA cudaMemGetInfo(size_t* free, size_t* total) {
  RUNTIME(cudaMemGetInfo, 3020);
  ON_DEVICE;
  advance(now_ns());
  *total = size_t(setting("MEMORY"));
  *free = *total - std::min(*total, used_bytes(current_device));
  return call.say(cudaSuccess);
}
CUDA cudaHostGetDevicePointer(void** of_device, void* pointer, unsigned) {
  RUNTIME(cudaHostGetDevicePointer, 3020);
  LOCKED;
  auto* found = allocation_of(pointer);
  bool pinned = found && found->kind == cudaMemoryTypeHost;
  *of_device = pinned ? pointer : nullptr;
  return call.say(pinned ? cudaSuccess : cudaErrorInvalidValue);
}
CUDA cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  RUNTIME(cudaPointerGetAttributes, 4000);
  LOCKED;
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;
  if (auto* found = allocation_of(pointer)) {
    attributes->type = cudaMemoryType(found->kind);
    attributes->device = found->device;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = found->kind == cudaMemoryTypeDevice ? nullptr : const_cast<void*>(pointer);
  }
  return call.say(cudaSuccess);
}

// ---- pools of cudaMallocAsync: one for each device, which keeps nothing

static cudaMemPool_t pool_of(int device) { return reinterpret_cast<cudaMemPool_t>(uintptr_t(0x1000 + device)); }

CUDA cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  RUNTIME(cudaDeviceGetDefaultMemPool, 11020);
  *pool = pool_of(device);
  return call.say(cudaSuccess);
}
CUDA cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  RUNTIME(cudaMemPoolGetAttribute, 11020);
  LOCKED;
  advance(now_ns());
  *static_cast<uint64_t*>(value) = state().used[(uintptr_t(pool) - 0x1000) % kMostDevices];
  return call.say(cudaSuccess);
}
CUDA cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  RUNTIME(cudaMemPoolSetAttribute, 11020);
  return call.say(cudaSuccess);
}
CUDA cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  RUNTIME(cudaMemPoolSetAccess, 11020);
  return call.say(cudaSuccess);
}
CUDA cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  RUNTIME(cudaMemPoolTrimTo, 11020);
  return call.say(cudaSuccess);
}
CUDA cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  RUNTIME(cudaDeviceGetGraphMemAttribute, 11040);
  *static_cast<uint64_t*>(value) = 0;
  return call.say(cudaSuccess);
}
CUDA cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
  RUNTIME(cudaDeviceSetGraphMemAttribute, 11040);
  return call.say(cudaSuccess);
}

// ---- memory that is mapped into a reserved range, as torch's expandable segments are

struct Physical {
  size_t bytes;
  int device, references;
};

#define CU EXPORT CUresult
CU cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kUnit;
  return CUDA_SUCCESS;
}
CU cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  size_t room = bytes + kUnit;
  char* raw = static_cast<char*>(mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (raw == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  char* aligned = reinterpret_cast<char*>((uintptr_t(raw) + kUnit - 1) & ~uintptr_t(kUnit - 1));
  if (aligned > raw) munmap(raw, aligned - raw);
  munmap(aligned + bytes, raw + room - aligned - bytes);
  *address = CUdeviceptr(aligned);
  return CUDA_SUCCESS;
}
CU cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
static void release(Physical* physical) {  // the lock is held
  if (--physical->references) return;
  return_bytes(physical->bytes, physical->device);
  delete physical;
}
CU cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
               unsigned long long) {
  LOCKED;
  int device = properties->location.id;
  if (!reserve_bytes(bytes, device)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = CUmemGenericAllocationHandle(new Physical{bytes, device, 1});
  return CUDA_SUCCESS;
}
CU cuMemRelease(CUmemGenericAllocationHandle handle) {
  LOCKED;
  release(reinterpret_cast<Physical*>(handle));
  return CUDA_SUCCESS;
}
static std::map<uintptr_t, Physical*> mapped;
CU cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  LOCKED;
  auto* physical = reinterpret_cast<Physical*>(handle);
  ++physical->references;
  mapped[address] = physical;
  state().allocations[address] = {bytes, cudaMemoryTypeDevice, physical->device};
  return CUDA_SUCCESS;
}
CU cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc*, size_t) {
  return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE
                                                                                   : CUDA_SUCCESS;
}
CU cuMemUnmap(CUdeviceptr address, size_t bytes) {
  LOCKED;
  for (auto at = mapped.lower_bound(address); at != mapped.end() && at->first < address + bytes;
       at = mapped.erase(at)) {
    state().allocations.erase(at->first);
    release(at->second);
  }
  auto* pages = reinterpret_cast<void*>(address);
  madvise(pages, bytes, MADV_DONTNEED);
  mprotect(pages, bytes, PROT_NONE);
  return CUDA_SUCCESS;
}
