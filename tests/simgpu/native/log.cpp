// What the device did, by its own clock: one line of JSON each, for tests to compare with what profilers say.
#include <cxxabi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "sim.h"

EXPORT int sim_log_write(const char* path, int first);

namespace sim {
namespace {

struct Entry {
  const char* kind;
  const Kernel* kernel;
  int device;
  uint32_t stream, correlation, graph;
  int64_t enqueued, start, end, returned;
  size_t bytes, blocks, threads;
};

size_t volume(const dim3& size) { return size_t(size.x) * size.y * size.z; }

std::mutex m;
std::atomic<int> keepers{0};  // how many want the log
auto& entries = *new std::vector<Entry>;

void add(const Entry& entry) {
  std::lock_guard<std::mutex> lock(m);
  entries.push_back(entry);
}

// As a profiler shows it.
std::string readable(const std::string& mangled) {
  int status;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = text ? text : mangled;
  free(text);
  return name;
}

void write_at_exit() {
  std::string path = text_setting("LOG");
  size_t at = path.find("%p");
  if (at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
  sim_log_write(path.c_str(), 0);
}

bool keep_from_the_start() {
  if (text_setting("LOG").empty()) return false;
  ++keepers;
  atexit(write_at_exit);
  return true;
}

bool kept_from_the_start = keep_from_the_start();

}  // namespace

void log_work(const Op& op, int device) {
  if (!keepers) return;
  const char* kind = op.kind == Kind::Kernel ? "kernel" : op.kind == Kind::Memcpy ? "memcpy" : "memset";
  add({kind, op.kernel, device, op.stream_id, op.correlation, op.graph_id, op.enqueued, op.start, op.end, 0,
       op.bytes * op.height, op.kernel ? volume(op.grid) : 0, op.kernel ? volume(op.block) : 0});
}

void log_wait(const char* kind, int64_t called, int64_t ready, uint32_t correlation, uint32_t stream) {
  if (!keepers) return;
  add({kind, nullptr, current_device, stream, correlation, 0, called, called, std::max(called, ready), now_ns(), 0, 0,
       0});
}

// Returns where in the log the new part begins.
EXPORT int sim_log_start() {
  {
    LOCKED;
    advance(now_ns());
  }
  std::lock_guard<std::mutex> lock(m);
  ++keepers;
  return int(entries.size());
}
EXPORT void sim_log_stop() {
  std::lock_guard<std::mutex> lock(m);
  if (--keepers == 0) entries.clear();
}

// Takes the settings of the environment again, in a process that was forked before the GPU was used.
EXPORT void sim_renew() {
  read_environment_again();
  if (!kept_from_the_start) kept_from_the_start = keep_from_the_start();
}

// Returns 0, or 1 if the file cannot be written. Times are of CLOCK_REALTIME.
EXPORT int sim_log_write(const char* path, int first) {
  {
    LOCKED;
    advance(now_ns());
  }
  std::lock_guard<std::mutex> lock(m);
  FILE* file = fopen(path, "w");
  if (!file) return 1;
  int64_t offset = realtime_offset();
  for (size_t i = first; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    fprintf(file,
            "{\"kind\":\"%s\",\"name\":\"%s\",\"device\":%d,\"stream\":%u,\"correlation\":%u,\"graph\":%u,"
            "\"enqueued\":%lld,\"start\":%lld,\"end\":%lld,\"returned\":%lld,\"bytes\":%zu,\"blocks\":%zu,"
            "\"threads\":%zu}\n",
            entry.kind, entry.kernel ? readable(entry.kernel->name).c_str() : "", entry.device, entry.stream,
            entry.correlation, entry.graph, (long long)(entry.enqueued + offset), (long long)(entry.start + offset),
            (long long)(entry.end + offset), (long long)(entry.returned ? entry.returned + offset : 0), entry.bytes,
            entry.blocks, entry.threads);
  }
  return fclose(file) ? 1 : 0;
}

}  // namespace sim
