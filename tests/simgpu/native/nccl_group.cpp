// NCCL: groups, and the kernels that come of them: one for each communicator and stream.
#include <algorithm>

#include "collectives.h"

namespace sim::nccl {
namespace {

struct Part {
  std::shared_ptr<Communicator> communicator;
  cudaStream_t stream;
  std::vector<Task> tasks;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Communicator>> joined;
};
thread_local Group group;

// NCCL builds kernels for sums alone, of unsigned integers and floats, and takes them for all.
std::string kernel_name(const Letter& letter) {
  static const char* const types[] = {"u8",  "u8",  "u32", "u32",  "u64",    "u64",
                                      "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
  std::string type = types[letter.datatype];
  switch (letter.function) {
    case Function::AllReduce:
      return "AllReduce_Sum_" + type + "_RING_LL";
    case Function::Reduce:
      return "Reduce_Sum_" + type + "_RING_LL";
    case Function::ReduceScatter:
      return "ReduceScatter_Sum_" + type + "_RING_LL";
    case Function::AllGather:
      return "AllGather_RING_LL";
    case Function::Broadcast:
      return "Broadcast_RING_LL";
    default:
      return "SendRecv";
  }
}

std::string mangled(const std::string& kernel) {
  std::string name = "ncclDevKernel_" + kernel;
  return "_Z" + std::to_string(name.size()) + name + "24ncclDevKernelArgsStorageILm4096EE";
}

std::string kernel_name(const std::vector<Task>& tasks) {
  std::string name = kernel_name(tasks.front().letter);
  for (auto& task : tasks)
    if (kernel_name(task.letter) != name) return "Generic";
  return name;
}

// What passes the rank: of point-to-point operations, the larger direction.
uint64_t bytes_of(const std::vector<Task>& tasks) {
  uint64_t collective = 0, sent = 0, received = 0;
  for (auto& task : tasks) {
    auto& bytes = task.out == Lane::Collective ? collective : task.out == Lane::Send ? sent : received;
    bytes += task.letter.bytes;
  }
  return collective + std::max(sent, received);
}

class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device) { current_device = device; }
  ~OnDevice() { current_device = before_; }

 private:
  int before_;
};

ncclResult_t launch(Part& part) {
  static Setting base("NCCL_NS"), rate("NCCL_GBS");
  OnDevice device(part.communicator->device);
  auto meeting = std::make_shared<Meeting>();
  uint64_t bytes = bytes_of(part.tasks);
  std::string name = mangled(kernel_name(part.tasks));
  meeting->communicator = part.communicator;
  meeting->tasks = std::move(part.tasks);
  int64_t duration = base + int64_t(bytes / uint64_t(std::max<int64_t>(rate, 1)));  // 1 GB/s is a byte in 1 ns
  dim3 grid(unsigned(std::clamp<uint64_t>(bytes >> 18, 1, 24))), block(512);

  RUNTIME(cudaLaunchKernelExC, 11060);
  Kernel* kernel;
  {
    LOCKED;
    kernel = named_kernel(name);
    meeting->order = part.communicator->issued;
  }
  auto error = call.say(
      sim::launch(part.stream, kernel, grid, block, 0, call.correlation, nullptr, duration, std::move(meeting)));
  if (error != cudaSuccess)
    return fail(ncclUnhandledCudaError, std::string("Cuda failure '") + cudaGetErrorString(error) + "'");
  LOCKED;
  if (!stream_of(part.stream)->capture) ++part.communicator->issued;
  return ncclSuccess;
}

ncclResult_t finish() {
  Group all = std::move(group);
  group = {};
  ncclResult_t error = all.error;
  for (auto& communicator : all.joined)
    if (error == ncclSuccess) error = communicator->wait_for_all();
  for (auto& part : all.parts)
    if (error == ncclSuccess) error = launch(part);
  return error;
}

}  // namespace

ncclResult_t submit(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Task&& task) {
  auto found = std::find_if(group.parts.begin(), group.parts.end(),
                            [&](Part& part) { return part.communicator == communicator && part.stream == stream; });
  if (found == group.parts.end()) found = group.parts.insert(found, {communicator, stream, {}});
  found->tasks.push_back(std::move(task));
  return group.depth ? ncclSuccess : finish();
}

ncclResult_t submit(const std::shared_ptr<Communicator>& joined) {
  group.joined.push_back(joined);
  return group.depth ? ncclSuccess : finish();
}

ncclResult_t refuse(ncclResult_t result, const std::string& text) {
  if (group.depth) group.error = result;
  return fail(result, text);
}

}  // namespace sim::nccl

using namespace sim::nccl;

NCCL ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
NCCL ncclGroupEnd() {
  if (!group.depth) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  return --group.depth ? ncclSuccess : finish();
}
