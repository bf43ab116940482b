// NCCL: what a kernel does on its rank, a step each time that `meet` is called, until it has met the other ranks.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "collectives.h"

namespace sim::nccl {
namespace {

bool same(const Letter& one, const Letter& other) {
  return one.function == other.function && one.datatype == other.datatype && one.op == other.op &&
         one.root == other.root && one.bytes == other.bytes;
}

// NCCL does not compare what ranks do, so that they wait for each other for ever.
void tell_of_mismatch(const Communicator& communicator, const Letter& own, const Letter& other, int peer) {
  static bool told = false;
  if (told || !setting("VERBOSE")) return;
  told = true;
  fprintf(stderr,
          "simgpu: ranks %d and %d do not match: function %d of %llu bytes (type %d, op %d, root %d) and "
          "function %d of %llu (type %d, op %d, root %d)\n",
          communicator.rank, peer, int(own.function), (unsigned long long)own.bytes, own.datatype, own.op, own.root,
          int(other.function), (unsigned long long)other.bytes, other.datatype, other.op, other.root);
}

// As a copy to the host of all that the rank gives would have it: only a scalar is not read as it is.
bool is_known(const Task& task, const char* source, size_t bytes) {
  return task.letter.bytes > 8 || known_scalar(source, bytes);
}

class Step {
 public:
  explicit Step(Meeting& meeting, int64_t duration)
      : meeting_(meeting), communicator_(*meeting.communicator), duration_(duration) {}

  // Tasks of a lane to the same rank go one after another, all others at once.
  bool run() {
    bool all = true, busy[kLanes][kMostRanks] = {};
    for (auto& task : meeting_.tasks) {
      if (task.done) continue;
      bool is_free = std::none_of(task.exchanges.begin(), task.exchanges.end(),
                                  [&](Exchange& one) { return busy[int(task.out)][one.peer]; });
      task.done = is_free && advance(task);
      if (task.done) continue;
      for (auto& one : task.exchanges) busy[int(task.out)][one.peer] = true;
      all = false;
    }
    return all;
  }

 private:
  bool advance(Task& task) {
    if (task.factor.pointer) {  // read when the kernel starts
      task.letter.factor = value_of(std::exchange(task.factor.pointer, nullptr), task.letter.datatype);
    }
    if (!task.copied && !task.reduces && task.own_bytes && task.own != task.target) {
      bool known = is_known(task, task.own, task.own_bytes);
      memmove(task.target, task.own, task.own_bytes);
      wrote(task.target, task.own_bytes, known);
    }
    task.copied = true;
    bool done = true;
    for (auto& one : task.exchanges) done = advance(task, one) && done;
    return (!task.reduces || reduce(task)) && done;
  }

  bool advance(Task& task, Exchange& one) {
    auto& segment = *communicator_.segment;
    int rank = communicator_.rank;
    post(task, one, segment.port(task.out, rank, one.peer));
    take(task, one, segment.port(task.in, one.peer, rank));
    if (one.posted && one.sent < one.out)
      one.sent += segment.write(task.out, rank, one.peer, one.source + one.sent, one.out - one.sent);
    if (one.met && one.got < one.in && !task.reduces) {
      one.got += segment.read(task.in, one.peer, rank, one.target + one.got, one.in - one.got);
      if (one.got == one.in) wrote(one.target, one.in, task.known);
    }
    return one.posted && one.met && one.sent == one.out && (task.reduces || one.got == one.in);
  }

  void post(Task& task, Exchange& one, Port& port) {
    uint64_t posted = port.posted.load(std::memory_order_relaxed);
    if (one.posted || posted != port.taken.load(std::memory_order_acquire)) return;
    port.letter = task.letter;
    port.letter.start = tsc_of(meeting_.start);
    port.letter.duration = duration_;
    port.letter.known = !one.out || is_known(task, one.source, one.out);
    port.posted.store(posted + 1, std::memory_order_release);
    one.posted = true;
  }

  void take(Task& task, Exchange& one, Port& port) {
    uint64_t taken = port.taken.load(std::memory_order_relaxed);
    if (one.met || port.posted.load(std::memory_order_acquire) == taken) return;
    Letter letter = port.letter;
    if (!same(letter, task.letter)) return tell_of_mismatch(communicator_, task.letter, letter, one.peer);
    port.taken.store(taken + 1, std::memory_order_release);
    meeting_.latest = std::max(meeting_.latest, ns_of(letter.start));
    meeting_.longest = std::max(meeting_.longest, letter.duration);
    task.known = task.known && (!one.in || letter.known);
    one.factor = letter.factor;
    one.met = true;
  }

  // In the order of ranks, so that all get the same bits. What others have not got yet is not written over.
  bool reduce(Task& task) {
    constexpr size_t kPart = 16 << 10;
    alignas(8) static thread_local char sum[kPart * 8], part[kPart];
    auto& segment = *communicator_.segment;
    int rank = communicator_.rank;
    size_t ready = task.own_bytes;
    for (auto& one : task.exchanges) {
      auto& port = segment.port(task.in, one.peer, rank);
      if (one.in) ready = std::min(ready, one.met ? one.got + size_t(port.written - port.read) : 0);
      if (one.out) ready = std::min(ready, one.sent);
    }
    ready -= ready % size_of(task.letter.datatype);
    if (!task.reduced) task.known = task.known && is_known(task, task.own, task.own_bytes);
    while (task.reduced < ready) {
      size_t bytes = std::min(kPart, ready - task.reduced);
      bool own_is_in = false;
      auto take_own = [&] {
        memcpy(part, task.own + task.reduced, bytes);
        own_is_in = true;
        add(sum, part, bytes, task, task.letter.factor);
      };
      clear(sum, bytes, task);
      for (auto& one : task.exchanges) {
        if (one.peer > rank && !own_is_in) take_own();
        one.got += segment.read(task.in, one.peer, rank, part, bytes);
        add(sum, part, bytes, task, one.factor);
      }
      if (!own_is_in) take_own();
      store(task.target + task.reduced, sum, bytes, task, communicator_.ranks);
      task.reduced += bytes;
    }
    if (task.reduced < task.own_bytes) return false;
    wrote(task.target, task.own_bytes, task.known);
    return true;
  }

  Meeting& meeting_;
  Communicator& communicator_;
  int64_t duration_;
};

}  // namespace

int64_t meet(Meeting& meeting, int64_t earliest, int64_t duration) {
  auto& communicator = *meeting.communicator;
  if (meeting.end >= 0) return meeting.end;
  if (communicator.aborted_at >= 0)
    return meeting.end = std::max(communicator.aborted_at, std::max(earliest, meeting.start));
  if (meeting.order != communicator.done) return -1;
  if (meeting.start < 0) {
    meeting.start = meeting.latest = std::max(earliest, communicator.tail);
    meeting.longest = duration;
  }
  if (!Step(meeting, duration).run()) return -1;
  ++communicator.done;
  return meeting.end = communicator.tail = meeting.latest + meeting.longest;
}

std::shared_ptr<Meeting> another(const Meeting& meeting) {
  auto made = std::make_shared<Meeting>(meeting);
  made->order = made->communicator->issued++;
  return made;
}

}  // namespace sim::nccl
