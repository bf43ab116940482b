// Copies and fills: the only work that changes memory.
#include <sys/mman.h>

#include <algorithm>

#include "sim.h"

namespace sim {

static void forget_scalars(uintptr_t from, size_t bytes) {
  auto& scalars = state().scalars;
  scalars.erase(scalars.lower_bound(from), scalars.lower_bound(from + bytes));
}

// Kernels compute nothing, so a scalar that the host reads is 0 unless the host wrote it: stale memory would be a
// size, or the number of rounds of a loop.
static bool is_scalar(const Op& op) {
  return op.copy_kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH && op.bytes <= 8 && op.height == 1;
}
static bool scalar_of_a_kernel(const Op& op) {
  return is_scalar(op) && !op.reads_memory && !known_scalar(op.src, op.bytes);
}

bool known_scalar(const void* pointer, size_t bytes) {
  auto& scalars = state().scalars;
  uintptr_t at = uintptr_t(pointer), end = at + bytes;
  auto found = scalars.upper_bound(at);
  if (found != scalars.begin()) --found;
  for (; at < end && found != scalars.end() && found->first <= at; ++found)
    at = std::max(at, found->first + found->second);
  return at >= end;
}

void wrote(const void* pointer, size_t bytes, bool by_host) {
  forget_scalars(uintptr_t(pointer), bytes);
  if (by_host && bytes <= 8) state().scalars[uintptr_t(pointer)] = bytes;
}

void do_copy(Op& op) {
  if (op.scalar) {
    memcpy(op.dst, &*op.scalar, op.bytes);
    return;
  }
  if (scalar_of_a_kernel(op)) {
    memset(op.dst, 0, op.bytes);
    if (op.bytes == 1) *static_cast<char*>(op.dst) = op.reads_true;
    return;
  }
  if (op.dst_kind == CUPTI_ACTIVITY_MEMORY_KIND_DEVICE)
    wrote(op.dst, op.bytes,
          op.copy_kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD ||
              (op.copy_kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOD && known_scalar(op.src, op.bytes)));
  auto* from = op.staged ? op.staged->data() : static_cast<const char*>(op.src);
  for (size_t row = 0; row < op.height; ++row)
    memmove(static_cast<char*>(op.dst) + row * op.dst_pitch, from + row * op.src_pitch, op.bytes);
}

void do_memset(Op& op) {
  char* from = static_cast<char*>(op.dst);
  forget_scalars(uintptr_t(from), op.bytes);
  auto* allocation = op.value == 0 && op.bytes >= (1u << 20) ? allocation_of(from) : nullptr;
  if (allocation && allocation->kind == cudaMemoryTypeDevice) {  // whole pages go back, and come again as zeros
    uintptr_t first = (uintptr_t(from) + 4095) & ~uintptr_t(4095),
              last = (uintptr_t(from) + op.bytes) & ~uintptr_t(4095);
    if (madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) == 0) {
      memset(from, 0, first - uintptr_t(from));
      memset(reinterpret_cast<void*>(last), 0, uintptr_t(from) + op.bytes - last);
      return;
    }
  }
  memset(from, op.value, op.bytes);
}

// Where the memory is; of the host without registration it is pageable, or the device's if the call says so.
static uint8_t memory_of(const void* pointer, bool device_expected) {
  auto* found = allocation_of(pointer);
  switch (found ? found->kind : cudaMemoryTypeUnregistered) {
    case cudaMemoryTypeDevice:
      return CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    case cudaMemoryTypeHost:
      return CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
    case cudaMemoryTypeManaged:
      return CUPTI_ACTIVITY_MEMORY_KIND_MANAGED;
    default:
      return device_expected ? CUPTI_ACTIVITY_MEMORY_KIND_DEVICE : CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
  }
}

static int64_t length_of_copy(const Op& op) {
  static Setting base("COPY_NS"), pinned("PINNED_GBS"), pageable("PAGEABLE_GBS"), device("DEVICE_GBS");
  int64_t rate =
      op.copy_kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOD ? device
      : op.src_kind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE || op.dst_kind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE
          ? pageable
          : pinned;
  return base + int64_t(op.bytes * op.height / std::max<int64_t>(rate, 1));  // 1 GB/s is a byte in 1 ns
}

static void name_kinds(Op& op, cudaMemcpyKind kind) {
  op.src_kind = memory_of(op.src, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
  op.dst_kind = memory_of(op.dst, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
  bool from = op.src_kind == CUPTI_ACTIVITY_MEMORY_KIND_DEVICE, to = op.dst_kind == CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  op.copy_kind = from && to ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOD
                 : from     ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOH
                 : to       ? CUPTI_ACTIVITY_MEMCPY_KIND_HTOD
                            : CUPTI_ACTIVITY_MEMCPY_KIND_HTOH;
  op.host_visible = !to;
}

// all(), torch.equal and torch.isclose are true.
static bool is_comparison(const Kernel* kernel) {
  if (!kernel) return false;
  for (auto* part : {"and_kernel", "CompareEqFunctor", "BitwiseOrFunctorIbE"})
    if (kernel->name.find(part) != std::string::npos) return true;
  return false;
}

// A copy from pageable memory of at most STAGED_BYTES returns before it is done, as CUDA's guide says; a longer one,
// and one to pageable memory, does not.
static cudaError_t copy(cupti::Call& call, Lock& lock, Op&& op, cudaMemcpyKind kind, cudaStream_t handle,
                        bool async) {
  static Setting most_staged("STAGED_BYTES");
  if (auto error = use_device()) return error;
  size_t total = op.bytes * op.height;
  if (!total) return cudaSuccess;
  op.kind = Kind::Memcpy;
  op.correlation = call.correlation;
  op.async = async;
  name_kinds(op, kind);
  op.duration = length_of_copy(op);
  Stream* stream = stream_of(handle);
  if (stream->capture) return enqueue(stream, std::move(op));
  op.reads_true = is_comparison(stream->last);
  op.reads_memory = state().computes && !in_operator;
  if (is_scalar(op) && !scalars_to_come.empty()) {
    op.scalar = scalars_to_come.front();
    scalars_to_come.pop_front();
  }
  bool waits = !async || op.dst_kind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
  if (op.src_kind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE && total > size_t(most_staged)) {
    waits = true;
  } else if (op.src_kind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE) {
    op.staged = std::make_shared<std::vector<char>>(total);
    for (size_t row = 0; row < op.height; ++row)
      memcpy(op.staged->data() + row * op.bytes, static_cast<const char*>(op.src) + row * op.src_pitch, op.bytes);
    op.src_pitch = op.bytes;
  }
  auto error = enqueue(stream, std::move(op));
  if (error != cudaSuccess || !waits) return error;
  uint64_t target = stream->enqueued;
  wait_until(lock, [&] { return stream->done >= target; }, stream);
  log_wait("wait_copy", call.start, stream->tail, call.correlation, stream->id);
  return state().sticky;
}

static Op flat(void* dst, const void* src, size_t bytes) {
  Op op;
  op.dst = dst;
  op.src = src;
  op.bytes = op.dst_pitch = op.src_pitch = bytes;
  return op;
}

static cudaError_t fill(cupti::Call& call, void* pointer, int value, size_t bytes, cudaStream_t stream) {
  if (auto error = use_device()) return error;
  if (!bytes) return cudaSuccess;
  Op op;
  op.kind = Kind::Memset;
  op.dst = pointer;
  op.value = value;
  op.bytes = bytes;
  op.correlation = call.correlation;
  op.duration = setting("COPY_NS") + int64_t(bytes) / std::max<int64_t>(setting("DEVICE_GBS"), 1);
  return enqueue(stream_of(stream), std::move(op));
}

// The memory of a variable of the device.
static void* address_of(const void* symbol) {
  static std::map<const void*, void*> made;
  void*& address = made[symbol];
  if (!address) allocate(&address, 4096, cudaMemoryTypeDevice);
  return address;
}

}  // namespace sim

using namespace sim;

CUDA cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  RUNTIME(cudaMemcpyAsync, 3020);
  LOCKED;
  return call.say(copy(call, lock, flat(dst, src, bytes), kind, stream, true));
}
CUDA cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
  RUNTIME(cudaMemcpy, 3020);
  LOCKED;
  return call.say(copy(call, lock, flat(dst, src, bytes), kind, nullptr, false));
}
CUDA cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t bytes, cudaStream_t stream) {
  RUNTIME(cudaMemcpyPeerAsync, 4000);
  LOCKED;
  return call.say(copy(call, lock, flat(dst, src, bytes), cudaMemcpyDeviceToDevice, stream, true));
}
CUDA cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width, size_t height,
                       cudaMemcpyKind kind, cudaStream_t stream) {
  RUNTIME(cudaMemcpy2DAsync, 3020);
  LOCKED;
  Op op = flat(dst, src, width);
  op.height = height;
  op.dst_pitch = dst_pitch;
  op.src_pitch = src_pitch;
  return call.say(copy(call, lock, std::move(op), kind, stream, true));
}
CUDA cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  RUNTIME(cudaMemsetAsync, 3020);
  LOCKED;
  return call.say(fill(call, pointer, value, bytes, stream));
}
CUDA cudaMemset(void* pointer, int value, size_t bytes) {
  RUNTIME(cudaMemset, 3020);
  LOCKED;
  return call.say(fill(call, pointer, value, bytes, nullptr));
}
CUDA cudaGetSymbolAddress(void** pointer, const void* symbol) {
  RUNTIME(cudaGetSymbolAddress, 3020);
  ON_DEVICE;
  *pointer = address_of(symbol);
  return call.say(*pointer ? cudaSuccess : cudaErrorInvalidSymbol);
}
CUDA cudaMemcpyToSymbol(const void* symbol, const void* src, size_t bytes, size_t offset, cudaMemcpyKind kind) {
  RUNTIME(cudaMemcpyToSymbol, 3020);
  ON_DEVICE;
  char* address = static_cast<char*>(address_of(symbol));
  if (!address || offset + bytes > 4096) return call.say(cudaErrorInvalidSymbol);
  return call.say(copy(call, lock, flat(address + offset, src, bytes), kind, nullptr, false));
}
