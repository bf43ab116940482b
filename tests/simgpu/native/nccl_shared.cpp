// NCCL: the memory by which the ranks of a communicator meet. It is a file of /dev/shm until all have it mapped;
// whoever waits for others holds a lock on it, which ends with its process, so that a file without a lock is a
// leftover.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "collectives.h"

namespace sim::nccl {
namespace {

constexpr const char* kFolder = "/dev/shm/";
constexpr const char* kPrefix = "simgpu-nccl-";

size_t bytes_of_ports(int ranks) { return offsetof(Segment, ports) + sizeof(Port) * kLanes * ranks * ranks; }
size_t start_of_pipes(int ranks) { return (bytes_of_ports(ranks) + 63) & ~size_t(63); }
size_t bytes_of_segment(int ranks) { return start_of_pipes(ranks) + 2 * kPipeBytes * ranks * ranks; }

bool is_linked(int file) {
  struct stat status;
  return fstat(file, &status) == 0 && status.st_nlink > 0;
}

void remove_leftovers() {
  DIR* folder = opendir(kFolder);
  if (!folder) return;
  while (auto* entry = readdir(folder)) {
    if (strncmp(entry->d_name, kPrefix, strlen(kPrefix)) != 0) continue;
    std::string path = std::string(kFolder) + entry->d_name;
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) continue;
    if (flock(file, LOCK_EX | LOCK_NB) == 0) unlink(path.c_str());
    close(file);
  }
  closedir(folder);
}

int open_shared(const std::string& path) {
  for (;;) {
    int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || (flock(file, LOCK_SH) == 0 && is_linked(file))) return file;
    close(file);  // taken for a leftover before it was locked
  }
}

}  // namespace

char* Segment::pipe(Lane lane, int from, int to) {
  char* first = reinterpret_cast<char*>(this) + start_of_pipes(ranks);
  return first + ((int(lane) * ranks + from) * ranks + to) * kPipeBytes;
}

size_t Segment::write(Lane lane, int from, int to, const char* source, size_t bytes) {
  Port& way = port(lane, from, to);
  char* ring = pipe(lane, from, to);
  uint64_t at = way.written.load(std::memory_order_relaxed);
  bytes = std::min(bytes, size_t(kPipeBytes - (at - way.read.load(std::memory_order_acquire))));
  size_t place = at % kPipeBytes, first = std::min(bytes, kPipeBytes - place);
  memcpy(ring + place, source, first);
  memcpy(ring, source + first, bytes - first);
  way.written.store(at + bytes, std::memory_order_release);
  return bytes;
}

size_t Segment::read(Lane lane, int from, int to, char* target, size_t bytes) {
  Port& way = port(lane, from, to);
  const char* ring = pipe(lane, from, to);
  uint64_t at = way.read.load(std::memory_order_relaxed);
  bytes = std::min(bytes, size_t(way.written.load(std::memory_order_acquire) - at));
  size_t place = at % kPipeBytes, first = std::min(bytes, kPipeBytes - place);
  memcpy(target, ring + place, first);
  memcpy(target + first, ring, bytes - first);
  way.read.store(at + bytes, std::memory_order_release);
  return bytes;
}

std::string new_name() {
  remove_leftovers();
  uint64_t parts[2];
  while (getrandom(parts, sizeof parts, 0) != sizeof parts) {
  }
  char text[64];
  snprintf(text, sizeof text, "%s%016llx%016llx", kPrefix, (unsigned long long)parts[0],
           (unsigned long long)parts[1]);
  return text;
}

bool is_name(const std::string& name) {
  return name.compare(0, strlen(kPrefix), kPrefix) == 0 && name.find('/') == std::string::npos;
}

bool wait_for(const std::function<bool()>& done) {
  int64_t last = now_ns() + setting("NCCL_INIT_NS");
  while (!done()) {
    if (now_ns() > last) return false;
    timespec pause{0, 200000};
    nanosleep(&pause, nullptr);
  }
  return true;
}

ncclResult_t Communicator::join(const std::string& name, int ranks, int rank, std::shared_ptr<Communicator>* joined) {
  auto made = std::make_shared<Communicator>();
  made->name = name;
  made->ranks = ranks;
  made->rank = rank;
  made->device = current_device;
  *joined = made;
  std::string path = kFolder + name;
  size_t bytes = bytes_of_segment(ranks);
  made->file_ = open_shared(path);
  if (made->file_ < 0 || posix_fallocate(made->file_, 0, off_t(bytes)) != 0)
    return fail(ncclSystemError,
                "Error while creating shared memory segment " + path + " (size " + std::to_string(bytes) + ")");
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->file_, 0);
  if (mapped == MAP_FAILED) return fail(ncclSystemError, "Error while attaching to shared memory segment " + path);
  made->segment = static_cast<Segment*>(mapped);
  made->bytes_ = bytes;
  int no_ranks = 0, no_process = 0;
  if (!made->segment->ranks.compare_exchange_strong(no_ranks, ranks) && no_ranks != ranks)
    return fail(ncclInvalidArgument, "ranks of one communicator were given " + std::to_string(no_ranks) + " and " +
                                         std::to_string(ranks) + " as their number");
  if (!made->segment->process[rank].compare_exchange_strong(no_process, getpid()))
    return fail(ncclInvalidUsage, "Bootstrap Root : rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                                      " ranks has already checked in");
  if (++made->segment->joined == ranks) unlink(path.c_str());
  return ncclSuccess;
}

ncclResult_t Communicator::wait_for_all() {
  bool complete = wait_for([this] { return segment->joined == ranks; });
  if (!complete && is_linked(file_)) unlink((kFolder + name).c_str());
  close(file_);
  file_ = -1;
  if (complete) return ncclSuccess;
  return fail(ncclSystemError, "Timeout: " + std::to_string(segment->joined) + " of " + std::to_string(ranks) +
                                   " ranks have checked in");
}

Communicator::~Communicator() {
  if (file_ >= 0) close(file_);
  if (segment) munmap(segment, bytes_);
}

}  // namespace sim::nccl
