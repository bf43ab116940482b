// Which of the devices a process sees, and how each is known whatever it sees.
#include <algorithm>
#include <cstdio>

#include "sim.h"

namespace sim {

int all_devices() {
  static int count = std::clamp<int>(setting("DEVICES"), 0, kMostDevices);
  return count;
}

std::string uuid_of(int physical) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char two[3];
    snprintf(two, sizeof two, "%02x", (kFirstOfUuid + physical + i) & 0xff);
    text += two;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

// A number, or the beginning of a UUID; -1 for what is neither.
static int device_named(const std::string& name) {
  if (name.rfind("GPU-", 0) == 0) {
    for (int device = 0; device < all_devices(); ++device)
      if (uuid_of(device).rfind(name, 0) == 0) return device;
    return -1;
  }
  char* end;
  long number = strtol(name.c_str(), &end, 10);
  return end == name.c_str() || number < 0 || number >= all_devices() ? -1 : int(number);
}

// As the driver reads CUDA_VISIBLE_DEVICES: up to the first that is wrong, and none if one is named twice.
static const std::vector<int>& visible_devices() {
  static auto* kept = [] {
    auto* found = new std::vector<int>;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    for (int device = 0; !text && device < all_devices(); ++device) found->push_back(device);
    std::string names = text ? text : "";
    for (size_t at = 0; at < names.size();) {
      size_t end = std::min(names.find(',', at), names.size());
      int device = device_named(names.substr(at, end - at));
      if (device < 0) break;
      if (std::count(found->begin(), found->end(), device)) {
        found->clear();
        break;
      }
      found->push_back(device);
      at = end + 1;
    }
    return found;
  }();
  return *kept;
}

int device_count() { return int(visible_devices().size()); }

int physical_device(int device) { return visible_devices()[device]; }

int visible_device(int physical) {
  auto& all = visible_devices();
  auto found = std::find(all.begin(), all.end(), physical);
  return found == all.end() ? -1 : int(found - all.begin());
}

}  // namespace sim
