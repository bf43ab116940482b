// Records of CUPTI: one for each kernel, memcpy, memset, synchronization and call, as a tool reads them.
#include "cupti.h"

#include <pthread.h>
#include <unistd.h>

namespace sim::cupti {
namespace {

// Far outside any recording, so that Kineto drops the record.
constexpr int64_t kLostBy = 100000000000000;

struct Span {
  uint64_t start, end;
};

// pytorch#192021: the k-th session of a process loses the records of its first k kernels.
bool is_lost() {
  static Setting loses("LOST_RECORDS");
  static int64_t in_session = 0, kernels = 0;  // the lock of the device is held
  if (!loses) return false;
  if (in_session != session()) kernels = 0;
  in_session = session();
  return kernels++ < in_session;
}

Span span_of(const Op& op) {
  static Setting zero("ZERO_STAMPS");
  if (zero) return {0, 0};
  int64_t wrong_by = op.kind == Kind::Kernel && is_lost() ? kLostBy : 0;
  return {stamp(op.start + wrong_by), stamp(op.end + wrong_by)};
}

// What kernels, copies and fills have in common.
template <class Record>
Record record_of(CUpti_ActivityKind kind, const Op& op, int device) {
  Record record{};
  auto [start, end] = span_of(op);
  record.kind = kind;
  record.start = start;
  record.end = end;
  record.deviceId = device;
  record.contextId = device + 1;
  record.streamId = op.stream_id;
  record.correlationId = op.correlation;
  record.graphNodeId = op.graph_node;
  record.graphId = op.graph_id;
  return record;
}

void kernel(const Op& op, int device) {
  auto record = record_of<CUpti_ActivityKernel10>(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, op, device);
  record.name = op.kernel->name.c_str();
  record.completed = record.end;
  record.registersPerThread = 32;
  record.gridX = op.grid.x;
  record.gridY = op.grid.y;
  record.gridZ = op.grid.z;
  record.blockX = op.block.x;
  record.blockY = op.block.y;
  record.blockZ = op.block.z;
  record.dynamicSharedMemory = int(op.shared);
  put(record);
}

void copy(const Op& op, int device) {
  auto record = record_of<CUpti_ActivityMemcpy6>(CUPTI_ACTIVITY_KIND_MEMCPY, op, device);
  record.copyKind = op.copy_kind;
  record.srcKind = op.src_kind;
  record.dstKind = op.dst_kind;
  record.flags = op.async ? CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC : 0;
  record.bytes = op.bytes * op.height;
  record.copyCount = 1;
  put(record);
}

void fill(const Op& op, int device) {
  auto record = record_of<CUpti_ActivityMemset4>(CUPTI_ACTIVITY_KIND_MEMSET, op, device);
  record.value = op.value;
  record.bytes = op.bytes;
  record.memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  put(record);
}

}  // namespace

void work(const Op& op, int device) {
  if (op.kind == Kind::Kernel && is_recorded(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)) kernel(op, device);
  if (op.kind == Kind::Memcpy && is_recorded(CUPTI_ACTIVITY_KIND_MEMCPY)) copy(op, device);
  if (op.kind == Kind::Memset && is_recorded(CUPTI_ACTIVITY_KIND_MEMSET)) fill(op, device);
}

void event_record(const Op& op, int device) {
  if (!is_recorded(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION) && !is_recorded(CUPTI_ACTIVITY_KIND_CUDA_EVENT)) return;
  CUpti_ActivityCudaEvent2 record{};
  record.kind = CUPTI_ACTIVITY_KIND_CUDA_EVENT;
  record.correlationId = op.correlation;
  record.contextId = device + 1;
  record.streamId = op.stream_id;
  record.eventId = op.event->id;
  record.deviceId = device;
  record.deviceTimestamp = stamp(op.end);
  record.cudaEventSyncId = op.event->sync_id;
  put(record);
}

void synchronization(CUpti_ActivitySynchronizationType type, int64_t start, int64_t end, uint32_t correlation,
                     uint32_t stream, uint32_t event, uint64_t sync_id) {
  if (!is_recorded(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION)) return;
  CUpti_ActivitySynchronization2 record{};
  record.kind = CUPTI_ACTIVITY_KIND_SYNCHRONIZATION;
  record.type = type;
  record.start = stamp(start);
  record.end = stamp(end);
  record.correlationId = correlation;
  record.contextId = current_device + 1;
  record.streamId = stream;
  record.cudaEventId = event;
  record.cudaEventSyncId = sync_id;
  put(record);
}

void api_call(const Call& call, int64_t end) {
  if (!is_recorded(call.domain, call.cbid)) return;
  if (is_recorded(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION)) put_external_ids(call.correlation);
  auto kind = call.domain == CUPTI_CB_DOMAIN_RUNTIME_API ? CUPTI_ACTIVITY_KIND_RUNTIME : CUPTI_ACTIVITY_KIND_DRIVER;
  if (!is_recorded(kind)) return;
  CUpti_ActivityAPI record{};
  record.kind = kind;
  record.cbid = call.cbid;
  record.start = stamp(call.start);
  record.end = stamp(end);
  record.processId = getpid();
  record.threadId = uint32_t(pthread_self());
  record.correlationId = call.correlation;
  record.returnValue = call.result;
  put(record);
}

}  // namespace sim::cupti
