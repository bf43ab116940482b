// Streams, and the calls that wait for them.
#include <algorithm>

#include "sim.h"

using namespace sim;

namespace {

cudaError_t make(cudaStream_t* handle, unsigned flags, int priority) {
  auto* stream = new Stream;
  stream->id = state().next_stream++;
  stream->device = current_device;
  stream->flags = flags;
  stream->priority = std::clamp(priority, -5, 0);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

// Whether the stream is being captured: then a call that would wait ends the capture.
bool spoils_capture(Stream* stream) {
  if (stream->capture) stream->capture->invalid = true;
  return stream->capture;
}

}  // namespace

CUDA cudaStreamCreate(cudaStream_t* stream) {
  RUNTIME(cudaStreamCreate, 3020);
  ON_DEVICE;
  return call.say(make(stream, 0, 0));
}
CUDA cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  RUNTIME(cudaStreamCreateWithFlags, 5000);
  ON_DEVICE;
  return call.say(make(stream, flags, 0));
}
CUDA cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  RUNTIME(cudaStreamCreateWithPriority, 5050);
  ON_DEVICE;
  return call.say(make(stream, flags, priority));
}
CUDA cudaStreamDestroy(cudaStream_t handle) {
  RUNTIME(cudaStreamDestroy, 5050);
  ON_DEVICE;
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (stream->queue.empty())
    delete stream;
  else
    stream->destroyed = true;
  return call.say(cudaSuccess);
}
CUDA cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  RUNTIME(cudaStreamGetPriority, 5050);
  ON_DEVICE;
  *priority = stream_of(stream)->priority;
  return call.say(cudaSuccess);
}
CUDA cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  RUNTIME(cudaStreamGetFlags, 5050);
  ON_DEVICE;
  *flags = stream_of(stream)->flags;
  return call.say(cudaSuccess);
}
CUDA cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  RUNTIME(cudaStreamGetId, 12000);
  ON_DEVICE;
  *id = stream_of(stream)->id;
  return call.say(cudaSuccess);
}
CUDA cudaStreamGetDevice(cudaStream_t stream, int* device) {
  RUNTIME(cudaStreamGetDevice, 12080);
  ON_DEVICE;
  *device = stream_of(stream)->device;
  return call.say(cudaSuccess);
}
CUDA cudaStreamQuery(cudaStream_t handle) {
  RUNTIME(cudaStreamQuery, 3020);
  ON_DEVICE;
  auto* stream = stream_of(handle);
  if (spoils_capture(stream)) return call.say(cudaErrorStreamCaptureUnsupported);
  advance(now_ns());
  return call.say(stream->done >= stream->enqueued ? cudaSuccess : cudaErrorNotReady);
}
CUDA cudaStreamSynchronize(cudaStream_t handle) {
  RUNTIME(cudaStreamSynchronize, 3020);
  int64_t start = now_ns(), ready;
  uint32_t id;
  {
    ON_DEVICE;
    auto* stream = stream_of(handle);
    if (spoils_capture(stream)) return call.say(cudaErrorStreamCaptureUnsupported);
    id = stream->id;
    uint64_t target = stream->enqueued;
    wait_until(lock, [&] { return stream->done >= target; }, stream);
    ready = stream->tail;
  }
  int64_t end = now_ns();
  log_wait("wait_stream", start, ready, call.correlation, id);
  cupti::synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE, start, end, call.correlation, id,
                         ~0u, 0);
  return call.say(state().sticky);
}
CUDA cudaDeviceSynchronize() {
  RUNTIME(cudaDeviceSynchronize, 3020);
  int64_t start = now_ns(), ready;
  {
    ON_DEVICE;
    NOT_CAPTURED;
    drain(lock, current_device);
    ready = state().last_end[current_device];
  }
  int64_t end = now_ns();
  log_wait("wait_device", start, ready, call.correlation);
  cupti::synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE, start, end, call.correlation, ~0u,
                         ~0u, 0);
  return call.say(state().sticky);
}
CUDA cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  RUNTIME(cudaLaunchHostFunc, 10000);
  ON_DEVICE;
  Op op;
  op.kind = Kind::Host;
  op.function = function;
  op.data = data;
  op.correlation = call.correlation;
  return call.say(enqueue(stream_of(stream), std::move(op)));
}
CUDA cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  RUNTIME(cudaStreamAddCallback, 5000);
  ON_DEVICE;
  Op op;
  op.kind = Kind::Host;
  op.callback = callback;
  op.data = data;
  op.handle = stream;
  op.correlation = call.correlation;
  return call.say(enqueue(stream_of(stream), std::move(op)));
}
