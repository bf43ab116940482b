// The engine: streams, what is queued in them, and when each work starts and ends.
#include <pthread.h>

#include <algorithm>

#include "sim.h"

namespace sim {
thread_local int current_device = 0;

State& state() {
  static State* kept = [] {
    // A fork has none of the threads, so that CUDA refuses to work in it.
    pthread_atfork(nullptr, nullptr, [] {
      state().forked = state().initialized;
      new (&state().m) std::mutex;
    });
    return new State;
  }();
  return *kept;
}

// ---- when a work starts and ends

int64_t backlog_of(const Op& op) { return op.duration < kNever ? op.duration : 0; }

// Of a work whose start is known; of a collective -1 as long as ranks are missing.
static int64_t end_of(Op& op) {
  if (!op.meeting) return op.start + op.duration;
  return nccl::meet(*op.meeting, op.start, op.duration);
}

int64_t Plan::place(int64_t start) {
  static Setting gap("GAP_NS");
  int64_t last = start;
  for (auto& step : steps) {
    step.op.start = start;
    for (size_t before : step.after) step.op.start = std::max(step.op.start, steps[before].op.end + gap / 2);
    step.op.end = end_of(step.op);
    if (step.op.end < 0) return -1;
    last = std::max(last, step.op.end);
  }
  return last;
}

int64_t Plan::length() {
  int64_t sum = 0;
  for (auto& step : steps) sum += backlog_of(step.op);
  return sum;
}

// Places the first work of a stream in time; false if that depends on something unfinished.
static bool place(Stream* stream, Op& op) {
  static Setting latency("LATENCY_NS"), gap("GAP_NS");
  if (op.end >= 0) return true;
  if (op.running) return false;
  int64_t ready = std::max(op.enqueued, stream->tail);
  switch (op.kind) {
    case Kind::Kernel:
    case Kind::Memcpy:
    case Kind::Memset:
      op.start = std::max(op.enqueued + latency, stream->tail + gap);
      op.end = end_of(op);
      return op.end >= 0;
    case Kind::Wait:
      if (op.event->completed < op.version) return false;
      op.start = op.end = std::max(ready, op.event->time);
      return true;
    case Kind::Graph:
      op.start = std::max(op.enqueued + latency, stream->tail + gap);
      op.end = op.plan->place(op.start);
      return op.end >= 0;
    default:
      op.start = op.end = ready;
      return true;
  }
}

// ---- what a work does when it ends

static void finish(Stream* stream, Op& op) {
  switch (op.kind) {
    case Kind::Kernel:
      if (op.kernel->asserts) state().sticky = cudaErrorAssert;
      break;
    case Kind::Memcpy:
      do_copy(op);
      break;
    case Kind::Memset:
      do_memset(op);
      break;
    case Kind::Record:
      if (op.event->completed < op.version) {
        op.event->completed = op.version;
        op.event->time = op.end;
      }
      if (op.traced) cupti::event_record(op, stream->device);
      release(op.event);
      break;
    case Kind::Wait:
      release(op.event);
      break;
    case Kind::Free:
      free_allocation(op.dst);
      break;
    case Kind::Host:
    case Kind::Graph:
      break;
  }
  if (op.kind == Kind::Kernel || op.kind == Kind::Memcpy || op.kind == Kind::Memset) {
    if (op.traced) cupti::work(op, stream->device);
    log_work(op, stream->device);
  }
}

static void run_on_host(Stream* stream, Op op) {
  state().host_queue.push_back({stream, std::move(op)});
  state().host_changed.notify_one();
}

static void finish_graph(Stream* stream, Op& op) {
  for (auto& step : op.plan->steps) {
    Op part = step.op;
    part.correlation = op.correlation;
    part.traced = op.traced;
    part.enqueued = op.enqueued;
    part.graph_id = op.plan->id;
    if (step.on_first_stream) part.stream_id = stream->id;
    if (part.kind == Kind::Host) {
      run_on_host(nullptr, part);
    } else if (part.kind == Kind::Record) {
      ++part.event->references;
      part.version = ++part.event->recorded;
      finish(stream, part);
    } else if (part.kind != Kind::Wait) {
      finish(stream, part);
    }
  }
}

static void forget_if_empty(Stream* stream) {
  if (!stream->queue.empty()) return;
  auto& active = state().active;
  active.erase(std::find(active.begin(), active.end(), stream));
  if (stream->destroyed) delete stream;
}

// Does all work that ends until `now`, in the order of its ends.
void advance(int64_t now) {
  bool progress = false;
  for (;;) {
    Stream* next = nullptr;
    for (Stream* stream : state().active) {
      Op& op = stream->queue.front();
      if (!place(stream, op) || op.end > now) continue;
      if (!next || op.end < next->queue.front().end) next = stream;
    }
    if (!next) break;
    Op& op = next->queue.front();
    if (op.kind == Kind::Host && (op.function || op.callback)) {
      op.running = true;
      op.end = -1;
      run_on_host(next, op);
      continue;
    }
    if (op.kind == Kind::Graph) finish_graph(next, op);
    finish(next, op);
    next->tail = op.end;
    state().last_end[next->device] = std::max(state().last_end[next->device], op.end);
    next->backlog -= backlog_of(op);
    if (op.host_visible) --state().host_visible;
    ++next->done;
    next->queue.pop_front();
    progress = true;
    forget_if_empty(next);
  }
  if (progress) state().progressed.notify_all();
}

}  // namespace sim
