// Threads: those of the device, and those of the program while they wait for it.
#include <sys/prctl.h>

#include <algorithm>
#include <thread>

#include "sim.h"

namespace sim {

// When a work may have come further: a collective when another process has, which does not say so.
static int64_t next_look(const Op& op, int64_t now) {
  constexpr int64_t kRanks = 100000;
  if (op.end >= 0) return op.end;
  return op.meeting || op.plan ? now + kRanks : kNever;
}

// Does in time what the host can see without a call: copies to pinned memory, functions of the host. To wake a thread
// costs the call that does it up to 20 us, so that this one looks by itself for a while after there was work.
static void device_thread() {
  constexpr int64_t kShortest = 50000, kLongest = 1000000, kAwake = 50000000;
  prctl(PR_SET_NAME, "simgpu");
  Lock lock(state().m);
  for (int64_t awake_until = 0;;) {
    int64_t now = now_ns();
    advance(now);
    if (state().host_visible) awake_until = now + kAwake;
    if (now >= awake_until) {
      state().device_thread_sleeps = true;
      state().changed.wait(lock);
      state().device_thread_sleeps = false;
      continue;
    }
    int64_t next = now + kLongest;
    for (Stream* stream : state().active) next = std::min(next, next_look(stream->queue.front(), now));
    state().changed.wait_for(lock, std::chrono::nanoseconds(std::max(next - now, kShortest)));
  }
}

// Runs functions of the host that were put into streams.
static void host_thread() {
  Lock lock(state().m);
  for (;;) {
    state().host_changed.wait(lock, [] { return !state().host_queue.empty(); });
    auto [stream, op] = std::move(state().host_queue.front());
    state().host_queue.pop_front();
    lock.unlock();
    if (op.function) op.function(op.data);
    if (op.callback) op.callback(op.handle, cudaSuccess, op.data);
    lock.lock();
    if (stream) {
      auto& head = stream->queue.front();
      head.start = head.end = now_ns();
      head.running = false;
      head.function = nullptr;
      head.callback = nullptr;
    }
    advance(now_ns());
    state().progressed.notify_all();
    state().changed.notify_one();
  }
}

cudaError_t use_device() {
  auto& g = state();
  if (g.forked) return cudaErrorInitializationError;
  if (!g.initialized) {
    g.initialized = true;
    for (int device = 0; device < kMostDevices; ++device) {
      g.defaults[device] = new Stream;
      g.defaults[device]->id = 7;
      g.defaults[device]->device = device;
    }
    std::thread(device_thread).detach();
    std::thread(host_thread).detach();
  }
  if (!g.context[current_device]) {
    std::string condition = text_setting("DEVICE");
    if (condition == "exclusive") return cudaErrorDevicesUnavailable;
    bool full = used_bytes(current_device) + kContextBytes > size_t(setting("MEMORY"));
    if (full || condition == "full") return cudaErrorMemoryAllocation;
    g.context[current_device] = true;
    tell_used_bytes(current_device);
  }
  if (g.may_assert) advance(now_ns());
  return g.sticky;
}

// ---- threads of the program

static bool is_active(Stream* stream) {
  auto& active = state().active;
  return std::find(active.begin(), active.end(), stream) != active.end();
}

// Keeps the thread busy, as the driver does in a launch and at the end of a wait.
void spin_until(int64_t time) {
  while (now_ns() < time) {
  }
}

// When the stream may be down to `left` works: gaps and waits in its queue make that later.
static int64_t earliest_end(Stream* stream, int64_t now, size_t left) {
  constexpr int64_t kUnknown = 1000000;
  if (stream && is_active(stream) && stream->queue.front().end >= 0) {
    Op& head = stream->queue.front();
    return head.end + (left ? 0 : stream->backlog - backlog_of(head));
  }
  int64_t next = now + kUnknown;  // the work of another stream has to end before
  for (Stream* one : state().active) next = std::min(next, next_look(one->queue.front(), now));
  return next;
}

// Blocks until `done`; `stream` is what it waits for, down to `left` works in its queue. A thread that sleeps wakes
// late, the more the longer it slept, and one in the driver does not: the end of a wait is spun.
void wait_until(Lock& lock, const std::function<bool()>& done, Stream* stream, size_t left) {
  constexpr int64_t kShortestSpin = 60000, kLongestSpin = 300000, kLongest = 50000000;
  static thread_local bool precise = prctl(PR_SET_TIMERSLACK, 1000) == 0;
  (void)precise;
  for (;;) {
    int64_t now = now_ns();
    advance(now);
    if (done()) return;
    int64_t end = earliest_end(stream, now, left);
    int64_t spin = std::clamp((end - now) / 20, kShortestSpin, kLongestSpin);
    if (end - now > spin) {
      state().progressed.wait_for(lock, std::chrono::nanoseconds(std::min(end - now - spin, kLongest)));
    } else {
      lock.unlock();
      spin_until(std::max(end, now + 500));
      lock.lock();
    }
  }
}

// Blocks until a device has nothing to do.
void drain(Lock& lock, int device) {
  for (;;) {
    advance(now_ns());
    auto& active = state().active;
    auto busy = std::find_if(active.begin(), active.end(), [&](Stream* one) { return one->device == device; });
    if (busy == active.end()) return;
    Stream* stream = *busy;
    uint64_t target = stream->enqueued;
    // A stream that was destroyed vanishes with its last work.
    wait_until(lock, [&] { return !is_active(stream) || stream->done >= target; }, stream);
  }
}

}  // namespace sim
