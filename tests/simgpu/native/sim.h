// A GPU in software: what its parts share.
//
// Work is put into streams at the time of the call, and is done by `advance`, which any call that needs its effect
// runs first. One lock, `State::m`, guards everything but the buffers of CUPTI.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace sim {

constexpr int kMostDevices = 16;
constexpr int64_t kNever = INT64_MAX / 4;
constexpr size_t kContextBytes = size_t(500) << 20;  // what a context takes of the memory of a GPU

int64_t now_ns();             // the clock of everything: CLOCK_MONOTONIC, read through the TSC
uint64_t tsc_of(int64_t ns);  // the TSC at a time of that clock
int64_t ns_of(uint64_t tsc);  // the reverse
int64_t realtime_offset();    // what CLOCK_REALTIME is ahead of it now

// ---- settings.cpp: each is SIMGPU_NAME in the environment, and can be set while a program runs
int64_t setting(const char* name);
class Setting {  // the same, looked up again only after a change
 public:
  explicit Setting(const char* name) : name_(name) {}
  operator int64_t();

 private:
  const char* name_;
  std::atomic<int64_t> value_{0};
  std::atomic<unsigned> version_{0};
};
double setting_of_device(const char* name, int device, double otherwise);  // of "1=2.5,3=2"
std::string text_setting(const char* name);
int64_t duration_by_name(const std::string& kernel);  // of SIMGPU_DURATIONS; -1 without
unsigned settings_version();
void read_environment_again();
int missing(const char* name, int code);  // notes that a function is not implemented, and returns the code

namespace nccl {
struct Meeting;
}

// ---- what a program makes
struct Kernel {
  std::string name;  // mangled
  int64_t duration = -1;
  bool asserts = false;
  unsigned version = 0;  // of the settings, when these were looked up
};

struct Event {
  uint32_t id = 0;
  unsigned flags = 0;
  uint64_t recorded = 0, completed = 0;  // how often
  int64_t time = 0;
  int references = 1;
  struct Capture* capture = nullptr;
  std::vector<struct Node*> capture_after;
  uint64_t sync_id = 0;
  struct Stream* stream = nullptr;
};

enum class Kind { Kernel, Memcpy, Memset, Record, Wait, Host, Free, Graph };

struct Op {
  Kind kind = Kind::Kernel;
  uint32_t correlation = 0;
  bool traced = false;
  int64_t enqueued = 0, duration = 0, start = -1, end = -1;
  uint32_t stream_id = 0;
  // a kernel
  Kernel* kernel = nullptr;
  dim3 grid, block;
  size_t shared = 0;
  std::shared_ptr<nccl::Meeting> meeting;  // of a collective
  // memory: `height` rows of `bytes`
  void* dst = nullptr;
  const void* src = nullptr;
  size_t bytes = 0, height = 1, dst_pitch = 0, src_pitch = 0;
  int value = 0;
  uint8_t copy_kind = 0, src_kind = 0, dst_kind = 0;
  bool async = true;
  bool host_visible = false;  // its effect can be seen without a call
  bool reads_true = false;    // the scalar that it copies is the result of a comparison
  bool reads_memory = false;  // a scalar is what the memory holds
  std::optional<int64_t> scalar;  // what it reads in place of that
  std::shared_ptr<std::vector<char>> staged;
  // events and functions of the host
  Event* event = nullptr;
  uint64_t version = 0;
  cudaHostFn_t function = nullptr;
  cudaStreamCallback_t callback = nullptr;
  void* data = nullptr;
  cudaStream_t handle = nullptr;
  bool running = false;
  // graphs
  std::shared_ptr<struct Plan> plan;
  uint32_t graph_id = 0;
  uint64_t graph_node = 0;
};

struct Node {
  Op op;
  std::vector<Node*> after;
  uint32_t stream_id = 0;
  uint64_t id = 0;
};

struct Graph {
  uint32_t id = 0;
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<struct UserObject*> objects;
};

struct Plan {  // an instantiated graph
  uint32_t id = 0;
  struct Step {
    Op op;
    std::vector<size_t> after;
    bool on_first_stream = true;
  };
  std::vector<Step> steps;
  // When each step starts and ends; returns the last end, or -1 if that depends on other ranks.
  int64_t place(int64_t start);
  int64_t length();  // as long as no rank waits for another
};

struct Capture {
  uint64_t id = 0;
  Graph* graph = nullptr;
  struct Stream* origin = nullptr;
  bool invalid = false;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::set<struct Stream*> streams;
};

struct Stream {
  uint32_t id = 0;
  int device = 0, priority = 0;
  unsigned flags = 0;
  std::deque<Op> queue;
  int64_t tail = 0;     // when the last completed work ended
  int64_t backlog = 0;  // the sum of the durations in the queue
  uint64_t enqueued = 0, done = 0;
  bool destroyed = false;
  Kernel* last = nullptr;
  Capture* capture = nullptr;
  std::vector<Node*> capture_after;
};

struct Allocation {
  size_t size = 0;
  int kind = 0;  // cudaMemoryType
  int device = 0;
};

struct State {
  std::mutex m;
  std::condition_variable changed;     // for the thread of the device
  std::condition_variable progressed;  // for those that wait
  std::condition_variable host_changed;
  std::vector<Stream*> active;
  Stream* defaults[kMostDevices] = {};
  std::map<uintptr_t, Allocation> allocations;
  std::map<uintptr_t, size_t> scalars;  // of up to 8 bytes that the host wrote
  size_t used[kMostDevices] = {};
  int64_t last_end[kMostDevices] = {};  // of the work of a device
  bool context[kMostDevices] = {};      // whether the device was used
  bool initialized = false, forked = false;
  bool computes = false;  // something else computes the values
  std::vector<unsigned> launched_graphs;  // since numerics() asked last
  uint32_t next_stream = 13, next_event = 1, next_graph = 1;
  uint64_t next_capture = 1, next_sync = 1, launches = 0;
  int host_visible = 0;  // queued works of this kind
  bool device_thread_sleeps = false;
  std::deque<std::pair<Stream*, Op>> host_queue;
  cudaError_t sticky = cudaSuccess;
  bool may_assert = false;  // a kernel was launched that raises an assertion
  std::unordered_map<const void*, Kernel*> by_host;
  std::set<const void*> kernels;
  std::unordered_map<std::string, Kernel*> by_name;
  std::set<Capture*> captures;
};
State& state();
using Lock = std::unique_lock<std::mutex>;
extern thread_local int current_device;

// ---- engine.cpp; the lock is held
void advance(int64_t now);         // does all work that ends until then
int64_t backlog_of(const Op& op);  // its part of the backlog of a stream

// ---- threads.cpp; the lock is held but for `spin_until`
cudaError_t use_device();  // makes the context of the current device
void wait_until(Lock& lock, const std::function<bool()>& done, Stream* stream, size_t left = 0);
void drain(Lock& lock, int device);
void spin_until(int64_t time);

// ---- launch.cpp; the lock is held for `stream_of`, `enqueue` and `named_kernel`
Stream* stream_of(cudaStream_t handle);
cudaError_t enqueue(Stream* stream, Op&& op);  // into the stream, or into the graph that it captures
cudaError_t launch(cudaStream_t stream, Kernel* kernel, dim3 grid, dim3 block, size_t shared, uint32_t correlation,
                   void** arguments = nullptr, int64_t duration = -1,
                   std::shared_ptr<nccl::Meeting> meeting = nullptr);
Kernel* named_kernel(const std::string& name);
Kernel* kernel_of(const void* function);

// ---- memory.cpp; the lock is held
void free_allocation(void* pointer);
const Allocation* allocation_of(const void* pointer, uintptr_t* base = nullptr);
cudaError_t allocate(void** pointer, size_t bytes, int kind);
bool reserve_bytes(size_t bytes, int device);  // of the memory of the device; false if it is full
void return_bytes(size_t bytes, int device);
bool forbidden_in_capture();  // whether a call that may not be captured has ended the captures

// ---- shared.cpp; the lock is held
size_t used_bytes(int device);  // of its memory, by this process and others, contexts included
size_t used_bytes_of_physical(int physical);
void tell_used_bytes(int device);  // writes for others what this process uses

// ---- copies.cpp
void do_copy(Op& op);
void do_memset(Op& op);
bool known_scalar(const void* pointer, size_t bytes);         // whether the host wrote it, and not a kernel
void wrote(const void* pointer, size_t bytes, bool by_host);  // that memory has new values

// ---- nccl_meet.cpp; the lock is held
namespace nccl {
int64_t meet(Meeting& meeting, int64_t earliest, int64_t duration);  // when the kernel ends; -1 if unknown yet
std::shared_ptr<Meeting> another(const Meeting& meeting);            // for one more launch
}  // namespace nccl

// ---- numerics.cpp
extern thread_local bool in_operator;
extern thread_local std::deque<int64_t> scalars_to_come;
bool is_past_operators(const Kernel* kernel);  // whether nobody computes what a kernel of the driver writes

// ---- events.cpp
void release(Event* event);

// ---- visible.cpp
constexpr int kFirstOfUuid = 0x51;
int all_devices();
int device_count();                // those that CUDA_VISIBLE_DEVICES lets the process see
int physical_device(int device);   // the number of a visible device among all
int visible_device(int physical);  // the reverse; -1 if the process does not see it
std::string uuid_of(int physical);

// ---- device.cpp
int attribute_of(int attribute, int device);

// ---- log.cpp: what the device did, by its own clock
void log_work(const Op& op, int device);
void log_wait(const char* kind, int64_t called, int64_t ready, uint32_t correlation, uint32_t stream = 0);

// ---- cupti.cpp
namespace cupti {
extern std::atomic<bool> any;
uint32_t next_correlation();
void work(const Op& op, int device);
void event_record(const Op& op, int device);
void synchronization(CUpti_ActivitySynchronizationType type, int64_t start, int64_t end, uint32_t correlation,
                     uint32_t stream, uint32_t event, uint64_t sync_id);
struct Call {  // one call of the runtime or the driver, from its entry to its return
  CUpti_CallbackDomain domain;
  uint32_t cbid, correlation;
  int64_t start = 0;
  bool traced = false, with_callbacks = false;
  uint64_t data = 0;
  cudaError_t result = cudaSuccess;
  Call(CUpti_CallbackDomain domain, uint32_t cbid);
  ~Call();
  cudaError_t say(cudaError_t error);  // the result; an error is kept for cudaGetLastError
};
}  // namespace cupti
}  // namespace sim

// The beginning of a function of the runtime: its record, the lock, and the context of the device.
#define RUNTIME(name, version) \
  sim::cupti::Call call(CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_RUNTIME_TRACE_CBID_##name##_v##version)
#define LOCKED sim::Lock lock(sim::state().m)
#define ON_DEVICE \
  LOCKED;         \
  if (auto error = sim::use_device()) return call.say(error)
#define NOT_CAPTURED \
  if (sim::forbidden_in_capture()) return call.say(cudaErrorStreamCaptureUnsupported)
#define CUDA EXPORT cudaError_t
