// Launches: how works come into streams, and how long kernels take.
#include <algorithm>

#include "sim.h"

namespace sim {

Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    return state().defaults[current_device];
  return reinterpret_cast<Stream*>(handle);
}

cudaError_t enqueue(Stream* stream, Op&& op) {
  auto& g = state();
  if (!op.enqueued) op.enqueued = now_ns();
  op.stream_id = stream->id;
  if (stream->capture && op.kind != Kind::Free) {
    if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    auto node = std::make_unique<Node>();
    node->op = std::move(op);
    node->op.traced = false;
    node->after = stream->capture_after;
    node->stream_id = stream->id;
    node->id = stream->capture->graph->nodes.size();
    stream->capture_after = {node.get()};
    stream->capture->graph->nodes.push_back(std::move(node));
    return cudaSuccess;
  }
  op.traced = cupti::any.load(std::memory_order_relaxed);
  op.host_visible = op.host_visible || op.meeting || op.kind == Kind::Host || op.kind == Kind::Graph;
  bool visible = op.host_visible, wake = op.kind == Kind::Host || g.device_thread_sleeps;
  if (stream->queue.empty()) g.active.push_back(stream);
  stream->backlog += backlog_of(op);
  ++stream->enqueued;
  if (visible) ++g.host_visible;
  stream->queue.push_back(std::move(op));
  if (stream->queue.size() > 4096) advance(now_ns());
  if (visible && wake) g.changed.notify_one();
  return cudaSuccess;
}

static void look_up(Kernel* kernel) {
  auto is_named_by = [&](const char* setting) {
    std::string part = text_setting(setting);
    return !part.empty() && kernel->name.find(part) != std::string::npos;
  };
  if (kernel->version == settings_version()) return;
  kernel->version = settings_version();
  kernel->duration = is_named_by("HANG") ? kNever : duration_by_name(kernel->name);
  kernel->asserts = is_named_by("ASSERT");
  state().may_assert |= kernel->asserts;
}

// torch.cuda._sleep takes its cycles, others what is set for their name, else a base and a time for each block.
static int64_t length_of(const Kernel* kernel, dim3 grid, void** arguments, int64_t given) {
  static Setting base("KERNEL_NS"), block("BLOCK_PS");
  if (kernel->duration >= 0) return kernel->duration;
  if (given >= 0) return given;
  if (arguments && kernel->name.find("spin_kernel") != std::string::npos)
    return int64_t(double(*static_cast<int64_t*>(arguments[0])) / 1.98);
  return base + int64_t(double(grid.x) * grid.y * grid.z * double(block) / 1000);
}

cudaError_t launch(cudaStream_t handle, Kernel* kernel, dim3 grid, dim3 block, size_t shared, uint32_t correlation,
                   void** arguments, int64_t duration, std::shared_ptr<nccl::Meeting> meeting) {
  static Setting cost("LAUNCH_NS"), depth("QUEUE"), failing("ERROR_AT_LAUNCH");
  int64_t done = now_ns() + cost;  // what else takes the CPU's time meanwhile does not delay the GPU
  spin_until(done);
  LOCKED;
  if (auto error = use_device()) return error;
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || block.x * block.y * block.z > 1024)
    return cudaErrorInvalidConfiguration;
  if (++state().launches == uint64_t(failing)) return state().sticky = cudaErrorIllegalAddress;
  Stream* stream = stream_of(handle);
  Op op;
  op.kind = Kind::Kernel;
  op.correlation = correlation;
  op.kernel = kernel;
  op.grid = grid;
  op.block = block;
  op.shared = shared;
  op.meeting = std::move(meeting);
  look_up(kernel);
  op.duration = length_of(kernel, grid, arguments, duration);
  if (op.duration < kNever) op.duration *= setting_of_device("SLOW", stream->device, 1);
  stream->last = kernel;
  if (!stream->capture && stream->queue.size() >= size_t(depth)) {
    int64_t called = now_ns();
    wait_until(lock, [&] { return stream->queue.size() < size_t(depth); }, stream, depth);
    log_wait("wait_queue", called, stream->tail, correlation, stream->id);
    done = now_ns();
  }
  op.enqueued = done;
  return enqueue(stream, std::move(op));
}

// ---- kernels by name

Kernel* named_kernel(const std::string& name) {
  auto& kernel = state().by_name[name];
  if (!kernel) {
    kernel = new Kernel;
    kernel->name = name;
    state().kernels.insert(kernel);
  }
  return kernel;
}

Kernel* kernel_of(const void* function) {
  LOCKED;
  auto found = state().by_host.find(function);
  if (found != state().by_host.end()) return found->second;
  return state().kernels.count(function) ? (Kernel*)function : nullptr;
}

}  // namespace sim
