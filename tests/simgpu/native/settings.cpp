// Settings: SIMGPU_* of the environment, until `sim_set` changes them.
#include <cstdio>
#include <cstdlib>

#include "sim.h"

namespace sim {
namespace {

// What each is for stands in tests/simgpu/settings.py.
constexpr const char* kDefaults[][2] = {
    {"DEVICES", "1"},
    {"MEMORY", "85899345920"},
    {"NAME", "Simulated GPU"},
    {"KERNEL_NS", "2500"},
    {"BLOCK_PS", "5000"},
    {"DURATIONS", ""},
    {"LAUNCH_NS", "1500"},
    {"LATENCY_NS", "5000"},
    {"GAP_NS", "1000"},
    {"QUEUE", "1024"},
    {"COPY_NS", "1500"},
    {"PINNED_GBS", "25"},
    {"PAGEABLE_GBS", "8"},
    {"DEVICE_GBS", "1500"},
    {"STAGED_BYTES", "65536"},
    {"GFLOPS", "50000"},
    {"HALF_GFLOPS", "600000"},
    {"SLOW", ""},
    {"NCCL_NS", "15000"},
    {"NCCL_GBS", "200"},
    {"NCCL_INIT_NS", "60000000000"},
    {"GEMM_SHAPES", "0"},
    {"VERBOSE", "0"},
    {"LOG", ""},
    {"ASSERT", ""},
    {"ERROR_AT_LAUNCH", "0"},
    {"HANG", ""},
    {"LARGEST_BYTES", "0"},
    {"DEVICE", ""},
    {"SHARED", ""},
    {"CUPTI", ""},
    {"LOST_RECORDS", "0"},
    {"LATE_RECORDS", "0"},
    {"ZERO_STAMPS", "0"},
};

struct Settings {
  std::mutex m;
  std::map<std::string, std::string> values;
  std::vector<std::pair<std::string, int64_t>> durations;
  std::atomic<unsigned> version{1};

  Settings() { read_environment(); }
  void read_environment() {
    for (auto& [name, otherwise] : kDefaults) {
      const char* given = getenv((std::string("SIMGPU_") + name).c_str());
      values[name] = given ? given : otherwise;
    }
    read_durations();
  }
  void read_durations() {  // "gemm=100000,elementwise=5000"
    durations.clear();
    const std::string& text = values["DURATIONS"];
    for (size_t at = 0; at < text.size();) {
      size_t end = std::min(text.find(',', at), text.size());
      std::string part = text.substr(at, end - at);
      size_t equals = part.rfind('=');
      if (equals != std::string::npos)
        durations.push_back({part.substr(0, equals), atoll(part.c_str() + equals + 1)});
      at = end + 1;
    }
  }
};

Settings& settings() {
  static auto* kept = new Settings;  // calls come until the very end of a process
  return *kept;
}

}  // namespace

std::string text_setting(const char* name) {
  std::lock_guard<std::mutex> lock(settings().m);
  return settings().values.at(name);
}

int64_t setting(const char* name) { return atoll(text_setting(name).c_str()); }

Setting::operator int64_t() {
  unsigned version = settings_version();
  if (version_.load(std::memory_order_relaxed) != version) {
    value_ = setting(name_);
    version_ = version;
  }
  return value_.load(std::memory_order_relaxed);
}

double setting_of_device(const char* name, int device, double otherwise) {
  std::string text = "," + text_setting(name), key = "," + std::to_string(device) + "=";
  size_t at = text.find(key);
  return at == std::string::npos ? otherwise : atof(text.c_str() + at + key.size());
}

int64_t duration_by_name(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(settings().m);
  int64_t found = -1;
  for (auto& [pattern, ns] : settings().durations)
    if (kernel.find(pattern) != std::string::npos) found = ns;
  return found;
}

// A process that was forked has an environment of its own.
void read_environment_again() {
  std::lock_guard<std::mutex> lock(settings().m);
  settings().read_environment();
  ++settings().version;
}

unsigned settings_version() { return settings().version.load(std::memory_order_relaxed); }

int missing(const char* name, int code) {
  static Setting verbose("VERBOSE");
  if (verbose) {
    static std::mutex m;
    static auto* seen = new std::set<std::string>;
    std::lock_guard<std::mutex> lock(m);
    if (seen->insert(name).second) fprintf(stderr, "simgpu: not implemented: %s -> %d\n", name, code);
  }
  return code;
}
extern "C" int simgpu_missing(const char* name, int code) { return missing(name, code); }

// The text is valid until the thread's next call.
EXPORT const char* sim_get(const char* name) {
  static thread_local std::string text;
  text = text_setting(name);
  return text.c_str();
}

// Returns 0; 1 for a name that is none.
EXPORT int sim_set(const char* name, const char* value) {
  auto& all = settings();
  std::lock_guard<std::mutex> lock(all.m);
  auto found = all.values.find(name);
  if (found == all.values.end()) return 1;
  found->second = value;
  all.read_durations();
  ++all.version;
  return 0;
}

}  // namespace sim
