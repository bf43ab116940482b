// Memory that processes share: each writes what it uses into its place of the file SHARED, if that is set. A place is
// held by a lock on its byte, which ends with its process however that ends.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

namespace sim {
namespace {

constexpr int kPlaces = 256;

struct Place {
  std::atomic<size_t> used[kMostDevices];
};

class Shared {
 public:
  Shared() {
    std::string path = text_setting("SHARED");
    if (path.empty()) return;
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0 || ftruncate(file_, sizeof(Place) * kPlaces)) return;
    void* mapped = mmap(nullptr, sizeof(Place) * kPlaces, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) return;
    places_ = static_cast<Place*>(mapped);
    for (own_ = 0; own_ < kPlaces && lock(F_SETLK, own_) != 0;) ++own_;
    if (own_ == kPlaces) return;
    for (auto& used : places_[own_].used) used = 0;
  }
  void write(int device, size_t bytes) {
    if (places_ && own_ < kPlaces) places_[own_].used[device] = bytes;
  }
  size_t of_others(int device) {
    size_t sum = 0;
    for (int place = 0; places_ && place < kPlaces; ++place) {
      size_t used = place == own_ ? 0 : places_[place].used[device].load();
      if (used && lock(F_GETLK, place) == F_WRLCK) sum += used;
    }
    return sum;
  }

 private:
  // Takes the lock of a place and returns 0, or tells whether another process has it.
  int lock(int command, int place) {
    struct flock region{};
    region.l_type = F_WRLCK;
    region.l_whence = SEEK_SET;
    region.l_start = place;
    region.l_len = 1;
    int failed = fcntl(file_, command, &region);
    return command == F_GETLK ? region.l_type : failed;
  }

  int file_ = -1, own_ = kPlaces;
  Place* places_ = nullptr;
};

Shared& shared() {
  static auto* kept = new Shared;
  return *kept;
}

size_t used_here(int device) { return state().used[device] + (state().context[device] ? kContextBytes : 0); }

}  // namespace

size_t used_bytes(int device) { return used_bytes_of_physical(physical_device(device)); }

size_t used_bytes_of_physical(int physical) {
  int device = visible_device(physical);
  return (device < 0 ? 0 : used_here(device)) + shared().of_others(physical);
}

void tell_used_bytes(int device) { shared().write(physical_device(device), used_here(device)); }

}  // namespace sim
