// What `simgpu.numerics()` needs: it computes on the CPU what each operator's kernels would have written.
#include <algorithm>
#include <cstdio>

#include "sim.h"

namespace sim {

thread_local bool in_operator = false;
thread_local std::deque<int64_t> scalars_to_come;

bool is_past_operators(const Kernel* kernel) {
  if (!state().computes || in_operator) return false;
  fprintf(stderr,
          "simgpu: numerics() computes operators of torch alone, and the kernel %s was launched without one, as "
          "Triton does for torch.compile: its results would be missing, so that its launch is an error\n",
          kernel ? kernel->name.c_str() : "of an unknown name");
  return true;
}

}  // namespace sim

using namespace sim;

// Something computes the values of kernels, so that scalars are what the memory holds.
EXPORT void sim_compute(int on) {
  LOCKED;
  state().computes = on;
}
EXPORT int sim_computes() {
  LOCKED;
  return state().computes;
}
// An operator begins on this thread: the scalars that it copies to the host read these numbers, and then 0.
EXPORT void sim_operator_begins(const int64_t* values, int count) {
  in_operator = true;
  scalars_to_come.assign(values, values + count);
}
EXPORT void sim_operator_ends() {
  in_operator = false;
  scalars_to_come.clear();
}
// Blocks until no device has work that ends, as no call does: without a record, or a line in the log.
EXPORT void sim_drain() {
  Lock lock(state().m);
  auto ends = [](Stream* stream) {
    auto& queue = stream->queue;
    return std::all_of(queue.begin(), queue.end(), [](Op& op) { return op.duration < kNever; });
  };
  for (;;) {
    advance(now_ns());
    auto& active = state().active;
    auto busy = std::find_if(active.begin(), active.end(), ends);
    if (busy == active.end()) return;
    Stream* stream = *busy;
    wait_until(
        lock, [&] { return std::find(active.begin(), active.end(), stream) == active.end() || !ends(stream); },
        stream);
  }
}
// Returns the number of the graph that a stream captures, or 0.
EXPORT unsigned sim_captured_graph(cudaStream_t handle) {
  LOCKED;
  if (!state().initialized) return 0;
  Stream* stream = stream_of(handle);
  return stream->capture ? stream->capture->graph->id : 0;
}
// Writes the numbers of the graphs that were launched since the last call, and returns how many; at most `most`.
EXPORT int sim_launched_graphs(unsigned* ids, int most) {
  LOCKED;
  auto& launched = state().launched_graphs;
  int count = std::min<int>(most, launched.size());
  std::copy_n(launched.begin(), count, ids);
  launched.erase(launched.begin(), launched.begin() + count);
  return count;
}
