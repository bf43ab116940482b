// NCCL: communicators, how they come to be and end, and what can be asked about them.
#include <algorithm>
#include <cstdlib>

#include "collectives.h"

using namespace sim;
using namespace sim::nccl;

namespace sim::nccl {

static std::string& last_error() {
  static auto* kept = new std::string;
  return *kept;
}

ncclResult_t fail(ncclResult_t result, const std::string& text) {
  static auto* m = new std::mutex;
  std::lock_guard<std::mutex> lock(*m);
  last_error() = text;
  const char* level = getenv("NCCL_DEBUG");
  if (level && strcasecmp(level, "VERSION") != 0) fprintf(stderr, "NCCL WARN %s\n", text.c_str());
  return result;
}

}  // namespace sim::nccl

namespace {

ncclResult_t begin(ncclComm_t* made, const std::string& name, int ranks, int rank) {
  *made = nullptr;
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks)
    return refuse(ncclInvalidArgument,
                  "Invalid rank requested : " + std::to_string(rank) + "/" + std::to_string(ranks));
  std::shared_ptr<Communicator> communicator;
  {
    LOCKED;
    if (use_device() != cudaSuccess) return refuse(ncclUnhandledCudaError, "Cuda failure in use_device");
  }
  if (auto error = Communicator::join(name, ranks, rank, &communicator)) return refuse(error, last_error());
  *made = new ncclComm{communicator};
  return ncclSuccess;
}

ncclResult_t create(ncclComm_t* made, const std::string& name, int ranks, int rank) {
  if (auto error = begin(made, name, ranks, rank)) return error;
  auto error = submit((*made)->communicator);
  if (error == ncclSuccess) return error;
  delete *made;
  *made = nullptr;
  return error;
}

ncclResult_t create(ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank) {
  std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
  if (!is_name(name)) return refuse(ncclInvalidArgument, "commId is none of ncclGetUniqueId");
  return create(made, name, ranks, rank);
}

// The ranks that chose the same color, in the order of their keys; empty if some never chose.
std::vector<int> choose(Communicator& parent, int color, int key) {
  auto* choices = parent.segment->choices;
  uint64_t turn = ++parent.turns;
  Choice& own = choices[parent.rank][turn % 2];
  own.color = color;
  own.key = key;
  own.turn.store(turn, std::memory_order_release);
  bool all = wait_for([&] {
    for (int rank = 0; rank < parent.ranks; ++rank)
      if (choices[rank][turn % 2].turn.load(std::memory_order_acquire) < turn) return false;
    return true;
  });
  std::vector<int> same;
  for (int rank = 0; all && rank < parent.ranks; ++rank)
    if (choices[rank][turn % 2].color == color) same.push_back(rank);
  std::stable_sort(same.begin(), same.end(),
                   [&](int one, int other) { return choices[one][turn % 2].key < choices[other][turn % 2].key; });
  return same;
}

}  // namespace

NCCL ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
NCCL ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  std::string name = new_name();
  memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}
NCCL ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return create(made, ranks, id, rank);
}
NCCL ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return create(made, ranks, id, rank);
}
NCCL ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return create(made, ranks, ids[0], rank);
}
NCCL ncclCommInitAll(ncclComm_t* made, int devices, const int* list) {
  std::string name = new_name();
  int before = current_device;
  ncclResult_t error = ncclGroupStart();
  for (int rank = 0; rank < devices && error == ncclSuccess; ++rank) {
    current_device = list ? list[rank] : rank;
    error = create(&made[rank], name, devices, rank);
  }
  current_device = before;
  auto ended = ncclGroupEnd();
  return error == ncclSuccess ? ended : error;
}
NCCL ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  *made = nullptr;
  if (!parent) return fail(ncclInvalidArgument, "CommSplit : comm argument is NULL");
  auto& from = *parent->communicator;
  auto same = choose(from, color, key);
  if (same.empty()) return fail(ncclSystemError, "Timeout: not all ranks have called ncclCommSplit");
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int rank = int(std::find(same.begin(), same.end(), from.rank) - same.begin());
  std::string name = from.name + "-" + std::to_string(from.turns) + "." + std::to_string(color);
  return create(made, name, int(same.size()), rank);
}
NCCL ncclCommShrink(ncclComm_t parent, int* excluded, int count, ncclComm_t* made, ncclConfig_t*, int flags) {
  *made = nullptr;
  if (!parent) return fail(ncclInvalidArgument, "CommShrink : comm argument is NULL");
  auto& from = *parent->communicator;
  auto is_excluded = [&](int rank) { return std::count(excluded, excluded + count, rank) > 0; };
  int ranks = 0, rank = -1;
  for (int one = 0; one < from.ranks; ++one) {
    if (one == from.rank) rank = ranks;
    ranks += !is_excluded(one);
  }
  if (is_excluded(from.rank)) return fail(ncclInvalidArgument, "CommShrink : the rank itself is excluded");
  if (flags & NCCL_SHRINK_ABORT) {
    LOCKED;
    from.aborted_at = now_ns();
    advance(now_ns());
  }
  std::string name = from.name + "-shrunk";
  for (int i = 0; i < count; ++i) name += "." + std::to_string(excluded[i]);
  return create(made, name, ranks, rank);
}

NCCL ncclCommFinalize(ncclComm_t comm) {
  return comm ? ncclSuccess : fail(ncclInvalidArgument, "CommFinalize : comm argument is NULL");
}
NCCL ncclCommDestroy(ncclComm_t comm) {
  LOCKED;
  delete comm;
  return ncclSuccess;
}
NCCL ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  LOCKED;
  comm->communicator->aborted_at = now_ns();
  advance(now_ns());
  state().progressed.notify_all();
  delete comm;
  return ncclSuccess;
}

NCCL ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = ncclSuccess;
  return comm ? ncclSuccess : fail(ncclInvalidArgument, "ncclGetAsyncError : comm argument is NULL");
}
NCCL ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->communicator->ranks;
  return ncclSuccess;
}
NCCL ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->communicator->rank;
  return ncclSuccess;
}
NCCL ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->communicator->device;
  return ncclSuccess;
}
EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                      "internal error - please report this issue to the NCCL developers",
                                      "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                      "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress",
                                      "operation timed out"};
  return unsigned(result) < std::size(texts) ? texts[result] : "unknown result code";
}
EXPORT const char* ncclGetLastError(ncclComm_t) { return last_error().c_str(); }

// ---- memory: nothing has to be registered

NCCL ncclMemAlloc(void** pointer, size_t bytes) {
  LOCKED;
  if (use_device() != cudaSuccess || allocate(pointer, bytes, cudaMemoryTypeDevice) != cudaSuccess)
    return fail(ncclUnhandledCudaError, "Cuda failure 'out of memory'");
  return ncclSuccess;
}
NCCL ncclMemFree(void* pointer) {
  LOCKED;
  if (!pointer) return ncclSuccess;
  drain(lock, current_device);
  free_allocation(pointer);
  return ncclSuccess;
}
NCCL ncclCommRegister(const ncclComm_t, void* pointer, size_t, void** handle) {
  *handle = pointer;
  return ncclSuccess;
}
NCCL ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
NCCL ncclCommWindowRegister(ncclComm_t, void* pointer, size_t, ncclWindow_t* window, int) {
  *window = static_cast<ncclWindow_t>(pointer);
  return ncclSuccess;
}
NCCL ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
