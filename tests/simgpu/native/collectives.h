// NCCL: what its parts share.
//
// Ranks are processes of one machine. Each pair of them has ports in memory that both have mapped: a letter says what
// a rank does and since when, and a pipe takes the bytes. A collective is a letter to each other rank and one from
// each, so that none can end before all have started.
#pragma once
// nccl.h includes the headers of the narrow floats, which need libcu++, but uses none of their names.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>

#include "sim.h"

namespace sim::nccl {

// ---- nccl_communicators.cpp
ncclResult_t fail(ncclResult_t result, const std::string& text);  // keeps the text for ncclGetLastError

constexpr int kMostRanks = 16;
constexpr size_t kPipeBytes = 128 << 10;

enum class Function : int32_t { AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, SendRecv };

struct Letter {
  Function function;
  int32_t datatype, op, root;
  uint64_t bytes;
  uint64_t start;    // TSC
  int64_t duration;  // by the settings of its writer
  double factor;     // of ncclRedOpCreatePreMulSum
  bool known;        // whether the bytes are a scalar that the host wrote
};

// From one rank to another. Each counter has one writer.
struct Port {
  std::atomic<uint64_t> posted, taken, written, read;
  Letter letter;
};

enum class Lane { Collective, Send, Receive };  // the last is the receiver's answer, and has no pipe
constexpr int kLanes = 3;

struct Choice {  // of a rank in ncclCommSplit
  std::atomic<uint64_t> turn;
  int32_t color, key;
};

// ---- nccl_shared.cpp
struct Segment {
  std::atomic<int> ranks, joined;
  std::atomic<int> process[kMostRanks];
  Choice choices[kMostRanks][2];
  Port ports[1];  // kLanes * ranks * ranks, and the pipes after them

  Port& port(Lane lane, int from, int to) { return ports[(int(lane) * ranks + from) * ranks + to]; }
  char* pipe(Lane lane, int from, int to);
  size_t write(Lane lane, int from, int to, const char* source, size_t bytes);  // returns how many it took
  size_t read(Lane lane, int from, int to, char* target, size_t bytes);         // returns how many there were
};
std::string new_name();
bool is_name(const std::string& name);
bool wait_for(const std::function<bool()>& done);  // false after NCCL_INIT_NS

struct Factor {  // of ncclRedOpCreatePreMulSum
  double value = 1;
  const void* pointer = nullptr;  // on the device
};

class Communicator {
 public:
  std::string name;
  int rank = 0, ranks = 1, device = 0;
  Segment* segment = nullptr;
  uint64_t turns = 0;  // of ncclCommSplit and ncclCommShrink
  std::map<int, Factor> factors;
  int next_factor = ncclNumOps;
  // The lock is held for these. Kernels of one communicator run one after another, on any stream.
  uint64_t issued = 0, done = 0;
  int64_t tail = 0, aborted_at = -1;

  static ncclResult_t join(const std::string& name, int ranks, int rank, std::shared_ptr<Communicator>* joined);
  ncclResult_t wait_for_all();
  ~Communicator();

 private:
  size_t bytes_ = 0;
  int file_ = -1;
};

// ---- nccl_meet.cpp
struct Exchange {  // what a task sends to a rank and gets from it
  int peer = 0;
  const char* source = nullptr;
  char* target = nullptr;
  size_t out = 0, in = 0, sent = 0, got = 0;
  double factor = 1;
  bool posted = false, met = false;
};

struct Task {
  Letter letter{};
  Lane out = Lane::Collective, in = Lane::Collective;
  std::vector<Exchange> exchanges;
  // what stays on the rank: copied, or reduced with what comes
  const char* own = nullptr;
  char* target = nullptr;
  size_t own_bytes = 0, reduced = 0;
  bool reduces = false, known = true, copied = false, done = false;
  Factor factor;
};

struct Meeting {  // a kernel
  std::shared_ptr<Communicator> communicator;
  std::vector<Task> tasks;
  uint64_t order = 0;
  int64_t start = -1, end = -1, latest = 0, longest = 0;
};

// ---- nccl_reduce.cpp
size_t size_of(int datatype);
double value_of(const void* pointer, int datatype);
// `sum` has 8 bytes for each element, whatever the type; `bytes` counts those of the type.
void clear(char* sum, size_t bytes, const Task& task);
void add(char* sum, const char* part, size_t bytes, const Task& task, double factor);
void store(char* target, const char* sum, size_t bytes, const Task& task, int ranks);

// ---- nccl_group.cpp
ncclResult_t submit(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Task&& task);
ncclResult_t refuse(ncclResult_t result, const std::string& text);  // also what the group returns
ncclResult_t submit(const std::shared_ptr<Communicator>& joined);   // waits for its ranks at the end of the group

}  // namespace sim::nccl

struct ncclComm {
  std::shared_ptr<sim::nccl::Communicator> communicator;
};
#define NCCL EXPORT ncclResult_t
