// Time: CLOCK_MONOTONIC, read through the TSC, as Kineto gives CUPTI the TSC for its records.
#include <time.h>
#include <x86intrin.h>

#include "sim.h"

namespace sim {
namespace {

struct Reading {
  uint64_t tsc;
  int64_t ns;
};

// The closest of several pairs: each may have been interrupted between its two parts.
Reading read(clockid_t id) {
  Reading best{};
  uint64_t closest = UINT64_MAX;
  for (int i = 0; i < 50; ++i) {
    timespec time;
    uint64_t before = __rdtsc();
    clock_gettime(id, &time);
    uint64_t after = __rdtsc();
    if (after - before >= closest) continue;
    closest = after - before;
    best = {before + closest / 2, time.tv_sec * 1000000000ll + time.tv_nsec};
  }
  return best;
}

const Reading at_load = read(CLOCK_MONOTONIC);

// The rate is measured from the load of the library to the first call, which `import torch` makes a second.
struct Clock {
  double ns_per_tick;

  Clock() {
    constexpr int64_t kLeast = 50000000;
    int64_t passed = read(CLOCK_MONOTONIC).ns - at_load.ns;
    timespec rest{0, long(kLeast - passed)};
    if (passed < kLeast) nanosleep(&rest, nullptr);
    Reading later = read(CLOCK_MONOTONIC);
    ns_per_tick = double(later.ns - at_load.ns) / double(later.tsc - at_load.tsc);
  }
};

const Clock& the_clock() {
  static Clock made;
  return made;
}

}  // namespace

int64_t ns_of(uint64_t tsc) {
  return at_load.ns + int64_t(double(int64_t(tsc - at_load.tsc)) * the_clock().ns_per_tick);
}

int64_t now_ns() { return ns_of(__rdtsc()); }

uint64_t tsc_of(int64_t ns) {
  double ticks = double(ns - at_load.ns) / the_clock().ns_per_tick;
  return at_load.tsc + uint64_t(int64_t(ticks + 0.5));
}

int64_t realtime_offset() {
  Reading now = read(CLOCK_REALTIME);
  return now.ns - ns_of(now.tsc);
}

}  // namespace sim
