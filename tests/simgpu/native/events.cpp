// Events: recorded into streams, waited for by streams and by the CPU.
#include <algorithm>

#include "sim.h"

void sim::release(Event* event) {
  if (--event->references == 0) delete event;
}

using namespace sim;

namespace {

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

bool is_captured(const Event* event) { return event->capture && state().captures.count(event->capture); }

cudaError_t make(cudaEvent_t* handle, unsigned flags) {
  auto* event = new Event;
  event->id = state().next_event++;
  event->flags = flags;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t record(cupti::Call& call, Event* event, Stream* stream, unsigned flags) {
  if (stream->capture && !(flags & cudaEventRecordExternal)) {
    event->capture = stream->capture;
    event->capture_after = stream->capture_after;
    return cudaSuccess;
  }
  Op op;
  op.kind = Kind::Record;
  op.event = event;
  op.correlation = call.correlation;
  if (!stream->capture) {
    event->capture = nullptr;
    op.version = ++event->recorded;
    event->stream = stream;
    event->sync_id = state().next_sync++;
    ++event->references;
  }
  return enqueue(stream, std::move(op));
}

// Lets a capture follow the event: the stream joins it, and its next node comes after those before the event.
cudaError_t join_capture(Stream* stream, Event* event) {
  if (stream->capture && stream->capture != event->capture) return cudaErrorStreamCaptureMerge;
  if (!stream->capture) {
    stream->capture = event->capture;
    stream->capture->streams.insert(stream);
    stream->capture_after.clear();
  }
  for (Node* node : event->capture_after)
    if (std::find(stream->capture_after.begin(), stream->capture_after.end(), node) == stream->capture_after.end())
      stream->capture_after.push_back(node);
  return cudaSuccess;
}

}  // namespace

CUDA cudaEventCreate(cudaEvent_t* event) {
  RUNTIME(cudaEventCreate, 3020);
  ON_DEVICE;
  return call.say(make(event, 0));
}
CUDA cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  RUNTIME(cudaEventCreateWithFlags, 3020);
  ON_DEVICE;
  return call.say(make(event, flags));
}
CUDA cudaEventDestroy(cudaEvent_t event) {
  RUNTIME(cudaEventDestroy, 3020);
  ON_DEVICE;
  release(event_of(event));
  return call.say(cudaSuccess);
}
CUDA cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RUNTIME(cudaEventRecord, 3020);
  ON_DEVICE;
  return call.say(record(call, event_of(event), stream_of(stream), 0));
}
CUDA cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  RUNTIME(cudaEventRecordWithFlags, 11010);
  ON_DEVICE;
  return call.say(record(call, event_of(event), stream_of(stream), flags));
}
CUDA cudaEventQuery(cudaEvent_t handle) {
  RUNTIME(cudaEventQuery, 3020);
  ON_DEVICE;
  auto* event = event_of(handle);
  if (is_captured(event)) {
    event->capture->invalid = true;
    return call.say(cudaErrorCapturedEvent);
  }
  advance(now_ns());
  return call.say(event->completed >= event->recorded ? cudaSuccess : cudaErrorNotReady);
}
CUDA cudaEventSynchronize(cudaEvent_t handle) {
  RUNTIME(cudaEventSynchronize, 3020);
  int64_t start = now_ns(), ready;
  auto* event = event_of(handle);
  {
    ON_DEVICE;
    uint64_t target = event->recorded;
    ++event->references;
    wait_until(lock, [&] { return event->completed >= target; }, event->stream);
    ready = event->time;
  }
  int64_t end = now_ns();
  log_wait("wait_event", start, ready, call.correlation);
  cupti::synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE, start, end, call.correlation, ~0u,
                         event->id, event->sync_id);
  LOCKED;
  release(event);
  return call.say(state().sticky);
}
CUDA cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  RUNTIME(cudaEventElapsedTime, 12080);
  ON_DEVICE;
  auto *from = event_of(first), *to = event_of(second);
  if (!from->recorded || !to->recorded || ((from->flags | to->flags) & cudaEventDisableTiming))
    return call.say(cudaErrorInvalidResourceHandle);
  advance(now_ns());
  if (from->completed < from->recorded || to->completed < to->recorded) return call.say(cudaErrorNotReady);
  *ms = float(double(to->time - from->time) / 1e6);
  return call.say(cudaSuccess);
}
CUDA cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  RUNTIME(cudaStreamWaitEvent, 3020);
  int64_t start = now_ns();
  auto* event = event_of(event_handle);
  uint32_t id;
  {
    ON_DEVICE;
    auto* stream = stream_of(handle);
    id = stream->id;
    bool external = flags & cudaEventWaitExternal;
    if (is_captured(event) && !external) return call.say(join_capture(stream, event));
    if (stream->capture && !external) {
      stream->capture->invalid = true;
      return call.say(cudaErrorStreamCaptureIsolation);
    }
    if (event->recorded > event->completed) {
      Op op;
      op.kind = Kind::Wait;
      op.event = event;
      op.version = event->recorded;
      op.correlation = call.correlation;
      ++event->references;
      enqueue(stream, std::move(op));
    }
  }
  cupti::synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT, start, now_ns(), call.correlation, id,
                         event->id, event->sync_id);
  return call.say(cudaSuccess);
}
