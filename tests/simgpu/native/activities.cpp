// Activities of CUPTI: which kinds are recorded, the clock of records, and the buffers in which a tool gets them.
#include <x86intrin.h>

#include <bitset>
#include <utility>

#include "cupti.h"

namespace sim::cupti {
namespace {

constexpr int kMostKinds = 256, kMostCalls = 4096, kExternalKinds = 8;

struct Buffer {
  uint8_t* bytes = nullptr;
  size_t capacity = 0, used = 0;
  int64_t flush = 0;  // how many flushes came before it was closed
};

struct Activities {
  std::mutex m;  // taken after that of the device
  std::atomic<bool> kinds[kMostKinds] = {};
  std::atomic<int64_t> sessions{0};
  std::bitset<kMostCalls> ignored_runtime, ignored_driver;

  CUpti_BuffersCallbackRequestFunc request = nullptr;
  CUpti_BuffersCallbackCompleteFunc complete = nullptr;
  Buffer current;
  std::deque<Buffer> closed;
  int64_t flushes = 0;
  size_t dropped = 0;

  CUpti_TimestampCallbackFunc clock = nullptr;
  bool clock_is_tsc = false;
  int64_t base_ns = 0;  // a time, and what a clock other than the TSC said then
  uint64_t base_stamp = 0;

  // With LATE_RECORDS=1 a buffer waits for the flush after the next, with 2 for ever.
  void deliver() {
    static Setting late("LATE_RECORDS");
    while (!closed.empty() && (!late || (late == 1 && closed.front().flush + 1 < flushes))) {
      Buffer buffer = closed.front();
      closed.pop_front();
      complete(nullptr, 0, buffer.bytes, buffer.capacity, buffer.used);
    }
  }
  void close() {
    if (!current.bytes) return;
    current.flush = flushes;
    closed.push_back(current);
    current = {};
  }
  bool open() {
    size_t most_records = 0;
    request(&current.bytes, &current.capacity, &most_records);
    if (!current.capacity) current.bytes = nullptr;
    return current.bytes;
  }
};

Activities& activities() {
  static auto* kept = new Activities;  // calls come until the very end of a process
  return *kept;
}

thread_local std::vector<uint64_t> external_ids[kExternalKinds];

size_t size_of(CUpti_ActivityKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      return sizeof(CUpti_ActivityKernel10);
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      return sizeof(CUpti_ActivityMemcpy6);
    case CUPTI_ACTIVITY_KIND_MEMSET:
      return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_RUNTIME:
    case CUPTI_ACTIVITY_KIND_DRIVER:
      return sizeof(CUpti_ActivityAPI);
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION:
      return sizeof(CUpti_ActivitySynchronization2);
    case CUPTI_ACTIVITY_KIND_CUDA_EVENT:
      return sizeof(CUpti_ActivityCudaEvent2);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION:
      return sizeof(CUpti_ActivityExternalCorrelation);
    default:
      return 0;
  }
}

}  // namespace

std::atomic<bool> any{false};

void update_any() {
  bool on = calls_back();
  for (auto& kind : activities().kinds) on = on || kind;
  any = on;
}

bool is_recorded(CUpti_ActivityKind kind) { return activities().kinds[kind].load(std::memory_order_relaxed); }

bool is_recorded(CUpti_CallbackDomain domain, uint32_t cbid) {
  auto& all = activities();
  bool runtime = domain == CUPTI_CB_DOMAIN_RUNTIME_API;
  std::lock_guard<std::mutex> lock(all.m);
  return !(runtime ? all.ignored_runtime : all.ignored_driver)[cbid % kMostCalls];
}

uint64_t stamp(int64_t ns) {
  auto& all = activities();
  static int64_t offset = realtime_offset();
  if (!all.clock) return ns + offset;
  return all.clock_is_tsc ? tsc_of(ns) : all.base_stamp + uint64_t(ns - all.base_ns);
}

int64_t session() { return activities().sessions; }

void put(const void* record, size_t bytes) {
  auto& all = activities();
  std::lock_guard<std::mutex> lock(all.m);
  if (all.current.bytes && all.current.used + bytes > all.current.capacity) {
    all.close();
    all.deliver();
  }
  if (!all.request || (!all.current.bytes && !all.open())) {
    ++all.dropped;
    return;
  }
  memcpy(all.current.bytes + all.current.used, record, bytes);
  all.current.used += bytes;
}

void put_external_ids(uint32_t correlation) {
  for (int kind = 0; kind < kExternalKinds; ++kind) {
    if (external_ids[kind].empty()) continue;
    CUpti_ActivityExternalCorrelation record{};
    record.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
    record.externalKind = CUpti_ExternalCorrelationKind(kind);
    record.externalId = external_ids[kind].back();
    record.correlationId = correlation;
    put(record);
  }
}

void stop_all() {
  for (auto& kind : activities().kinds) kind = false;
  update_any();
}

}  // namespace sim::cupti

using namespace sim;
using namespace sim::cupti;

namespace {

CUptiResult record_kind(CUpti_ActivityKind kind, bool on) {
  if (kind < 0 || kind >= kMostKinds) return CUPTI_ERROR_INVALID_KIND;
  if (on && !size_of(kind)) {  // accepted, as nothing of the kind ever happens
    missing(("CUPTI activity kind " + std::to_string(kind)).c_str(), 0);
    return CUPTI_SUCCESS;
  }
  bool was_on = activities().kinds[kind].exchange(on);
  if (on && !was_on && kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) ++activities().sessions;
  update_any();
  return CUPTI_SUCCESS;
}

CUptiResult record_call(std::bitset<kMostCalls>& ignored, CUpti_CallbackId cbid, bool on) {
  std::lock_guard<std::mutex> lock(activities().m);
  ignored[cbid % kMostCalls] = !on;
  return CUPTI_SUCCESS;
}

}  // namespace

CUPTI cuptiActivityEnable(CUpti_ActivityKind kind) {
  if (auto error = refusal()) return error;
  return record_kind(kind, true);
}
// Whether kernels are recorded now.
EXPORT int sim_records_kernels() { return is_recorded(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL); }
CUPTI cuptiActivityDisable(CUpti_ActivityKind kind) { return record_kind(kind, false); }
CUPTI cuptiActivityEnableRuntimeApi(CUpti_CallbackId cbid, uint8_t on) {
  return record_call(activities().ignored_runtime, cbid, on);
}
CUPTI cuptiActivityEnableDriverApi(CUpti_CallbackId cbid, uint8_t on) {
  return record_call(activities().ignored_driver, cbid, on);
}
CUPTI cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
CUPTI cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }

CUPTI cuptiGetTimestamp(uint64_t* time) {
  *time = stamp(now_ns());
  return CUPTI_SUCCESS;
}
CUPTI cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  auto& all = activities();
  std::lock_guard<std::mutex> lock(all.m);
  if (clock) {
    uint64_t before = __rdtsc(), said = clock(), after = __rdtsc();
    all.clock_is_tsc = before <= said && said <= after;
    all.base_ns = now_ns();
    all.base_stamp = clock();
  }
  all.clock = clock;
  return CUPTI_SUCCESS;
}

CUPTI cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                     CUpti_BuffersCallbackCompleteFunc complete) {
  auto& all = activities();
  std::lock_guard<std::mutex> lock(all.m);
  all.request = request;
  all.complete = complete;
  return CUPTI_SUCCESS;
}
CUPTI cuptiActivityFlushAll(uint32_t) {
  {
    LOCKED;
    advance(now_ns());
  }
  auto& all = activities();
  std::lock_guard<std::mutex> lock(all.m);
  all.close();
  ++all.flushes;
  if (all.complete) all.deliver();
  return CUPTI_SUCCESS;
}
CUPTI cuptiActivityGetNextRecord(uint8_t* bytes, size_t valid, CUpti_Activity** record) {
  uint8_t* next = *record ? reinterpret_cast<uint8_t*>(*record) + size_of((*record)->kind) : bytes;
  if (next >= bytes + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return size_of((*record)->kind) ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_KIND;
}
CUPTI cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* count) {
  auto& all = activities();
  std::lock_guard<std::mutex> lock(all.m);
  *count = std::exchange(all.dropped, 0);
  return CUPTI_SUCCESS;
}

CUPTI cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  if (unsigned(kind) >= kExternalKinds) return CUPTI_ERROR_INVALID_PARAMETER;
  external_ids[kind].push_back(id);
  return CUPTI_SUCCESS;
}
CUPTI cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  if (unsigned(kind) >= kExternalKinds) return CUPTI_ERROR_INVALID_PARAMETER;
  auto& ids = external_ids[kind];
  if (ids.empty()) return CUPTI_ERROR_QUEUE_EMPTY;
  if (last) *last = ids.back();
  ids.pop_back();
  return CUPTI_SUCCESS;
}
