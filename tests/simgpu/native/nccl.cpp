// NCCL: the operations, and what each rank sends and gets in them.
#include <algorithm>

#include "collectives.h"

using namespace sim;
using namespace sim::nccl;

namespace {

std::string wrong_argument(ncclComm_t comm, ncclDataType_t datatype, int op, int root) {
  if (!comm) return "comm argument is NULL";
  auto& communicator = *comm->communicator;
  if (unsigned(datatype) >= ncclNumTypes) return "invalid type " + std::to_string(datatype);
  if (root < 0 || root >= communicator.ranks)
    return "invalid root " + std::to_string(root) + " (root should be in the 0.." +
           std::to_string(communicator.ranks) + " range)";
  if (op < 0 || (op >= ncclNumOps && !communicator.factors.count(op)))
    return "invalid reduction operation " + std::to_string(op);
  return "";
}

// A call, from its arguments to the kernel.
class Operation {
 public:
  Operation(const char* name, Function function, ncclComm_t comm, cudaStream_t stream, size_t count,
            ncclDataType_t datatype, int op, int root)
      : name_(name), stream_(stream) {
    std::string wrong = wrong_argument(comm, datatype, op, root);
    if (!wrong.empty()) {
      refuse_with(wrong);
      return;
    }
    communicator_ = comm->communicator;
    rank = communicator_->rank;
    ranks = communicator_->ranks;
    auto factor = communicator_->factors.find(op);
    if (factor != communicator_->factors.end()) task.factor = factor->second;
    bytes = count * size_of(datatype);
    task.letter.function = function;
    task.letter.datatype = datatype;
    task.letter.op = std::min<int>(op, ncclNumOps);
    task.letter.root = root;
    task.letter.bytes = bytes;
    task.letter.factor = task.factor.value;
  }

  bool valid() const { return result_ == ncclSuccess && bytes; }

  // Every rank takes part, even one that has nothing to say.
  template <class Fill>
  ncclResult_t with_all(Fill fill) {
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      Exchange one;
      one.peer = peer;
      fill(one);
      task.exchanges.push_back(one);
    }
    return submit();
  }

  void keeps(const void* own, void* target) {
    task.own = static_cast<const char*>(own);
    task.target = static_cast<char*>(target);
    task.own_bytes = bytes;
  }
  void reduces(const void* own, void* target) {
    keeps(own, target);
    task.reduces = true;
  }

  ncclResult_t submit() {
    bool null = task.own_bytes && (!task.own || !task.target);
    for (auto& one : task.exchanges)
      null = null || (one.out && !one.source) || (one.in && !one.target && !task.reduces);
    if (null) refuse_with("buffer argument is NULL");
    if (result_ == ncclSuccess && ranks == 1 && task.exchanges.empty() && task.letter.op != ncclNumOps) return copy();
    return result_ == ncclSuccess ? sim::nccl::submit(communicator_, stream_, std::move(task)) : result_;
  }

  ncclResult_t result() const { return result_; }

  Task task;
  int rank = 0, ranks = 0;
  size_t bytes = 0;

 private:
  ncclResult_t copy() {
    if (task.own == task.target) return ncclSuccess;
    auto error = cudaMemcpyAsync(task.target, task.own, bytes, cudaMemcpyDeviceToDevice, stream_);
    return error ? refuse(ncclUnhandledCudaError, cudaGetErrorString(error)) : ncclSuccess;
  }
  void refuse_with(const std::string& text) {
    result_ = refuse(ncclInvalidArgument, std::string(name_) + " : " + text);
  }

  const char* name_;
  cudaStream_t stream_;
  std::shared_ptr<Communicator> communicator_;
  ncclResult_t result_ = ncclSuccess;
};

const char* at(const void* pointer, size_t offset) {
  return pointer ? static_cast<const char*>(pointer) + offset : nullptr;
}
char* at(void* pointer, size_t offset) { return pointer ? static_cast<char*>(pointer) + offset : nullptr; }

ncclResult_t send_or_receive(Operation& call, int peer, Exchange one, bool sends) {
  if (!call.valid()) return call.result();
  one.peer = peer;
  call.task.out = sends ? Lane::Send : Lane::Receive;
  call.task.in = sends ? Lane::Receive : Lane::Send;
  call.task.letter.root = call.task.letter.datatype = 0;
  call.task.exchanges = {one};
  return call.submit();
}

}  // namespace

NCCL ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                   ncclComm_t comm, cudaStream_t stream) {
  Operation call("AllReduce", Function::AllReduce, comm, stream, count, datatype, op, 0);
  if (!call.valid()) return call.result();
  call.reduces(send, receive);
  return call.with_all([&](Exchange& one) {
    one.source = at(send, 0);
    one.out = one.in = call.bytes;
  });
}
NCCL ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                   cudaStream_t stream) {
  Operation call("Broadcast", Function::Broadcast, comm, stream, count, datatype, 0, root);
  if (!call.valid()) return call.result();
  if (call.rank == root) call.keeps(send, receive);
  return call.with_all([&](Exchange& one) {
    one.source = at(send, 0);
    one.target = at(receive, 0);
    if (call.rank == root) one.out = call.bytes;
    if (one.peer == root) one.in = call.bytes;
  });
}
NCCL ncclBcast(void* buffer, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, datatype, root, comm, stream);
}
NCCL ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root,
                ncclComm_t comm, cudaStream_t stream) {
  Operation call("Reduce", Function::Reduce, comm, stream, count, datatype, op, root);
  if (!call.valid()) return call.result();
  if (call.rank == root) call.reduces(send, receive);
  return call.with_all([&](Exchange& one) {
    one.source = at(send, 0);
    if (one.peer == root) one.out = call.bytes;
    if (call.rank == root) one.in = call.bytes;
  });
}
NCCL ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                   cudaStream_t stream) {
  Operation call("AllGather", Function::AllGather, comm, stream, count, datatype, 0, 0);
  if (!call.valid()) return call.result();
  call.keeps(send, at(receive, call.rank * call.bytes));
  call.task.letter.bytes *= call.ranks;
  return call.with_all([&](Exchange& one) {
    one.source = at(send, 0);
    one.target = at(receive, one.peer * call.bytes);
    one.out = one.in = call.bytes;
  });
}
NCCL ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                       ncclComm_t comm, cudaStream_t stream) {
  Operation call("ReduceScatter", Function::ReduceScatter, comm, stream, count, datatype, op, 0);
  if (!call.valid()) return call.result();
  call.reduces(at(send, call.rank * call.bytes), receive);
  call.task.letter.bytes *= call.ranks;
  return call.with_all([&](Exchange& one) {
    one.source = at(send, one.peer * call.bytes);
    one.out = one.in = call.bytes;
  });
}

NCCL ncclSend(const void* send, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
              cudaStream_t stream) {
  Operation call("Send", Function::SendRecv, comm, stream, count, datatype, 0, peer);
  Exchange one;
  one.source = at(send, 0);
  one.out = call.bytes;
  return send_or_receive(call, peer, one, true);
}
NCCL ncclRecv(void* receive, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream) {
  Operation call("Recv", Function::SendRecv, comm, stream, count, datatype, 0, peer);
  Exchange one;
  one.target = at(receive, 0);
  one.in = call.bytes;
  return send_or_receive(call, peer, one, false);
}

// ---- those that are groups of sends and receives

namespace {

template <class Each>
ncclResult_t as_group(ncclComm_t comm, Each each) {
  if (!comm) return refuse(ncclInvalidArgument, "comm argument is NULL");
  ncclGroupStart();
  ncclResult_t error = ncclSuccess;
  for (int peer = 0; peer < comm->communicator->ranks; ++peer)
    if (error == ncclSuccess) error = each(peer);
  auto ended = ncclGroupEnd();
  return error == ncclSuccess ? ended : error;
}

}  // namespace

NCCL ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                  cudaStream_t stream) {
  size_t bytes = count * size_of(datatype);
  return as_group(comm, [&](int peer) {
    auto error = ncclSend(at(send, peer * bytes), count, datatype, peer, comm, stream);
    return error ? error : ncclRecv(at(receive, peer * bytes), count, datatype, peer, comm, stream);
  });
}
NCCL ncclGather(const void* send, void* receive, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                cudaStream_t stream) {
  size_t bytes = count * size_of(datatype);
  return as_group(comm, [&](int peer) {
    auto error = peer == root ? ncclSend(send, count, datatype, root, comm, stream) : ncclSuccess;
    if (error || comm->communicator->rank != root) return error;
    return ncclRecv(at(receive, peer * bytes), count, datatype, peer, comm, stream);
  });
}
NCCL ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                 cudaStream_t stream) {
  size_t bytes = count * size_of(datatype);
  return as_group(comm, [&](int peer) {
    auto error = peer == root ? ncclRecv(receive, count, datatype, root, comm, stream) : ncclSuccess;
    if (error || comm->communicator->rank != root) return error;
    return ncclSend(at(send, peer * bytes), count, datatype, peer, comm, stream);
  });
}

// ---- factors: a rank multiplies what it gives to a sum

NCCL ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype, ncclScalarResidence_t residence,
                              ncclComm_t comm) {
  if (!comm || !scalar) return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum : argument is NULL");
  Factor factor;
  if (residence == ncclScalarHostImmediate)
    factor.value = value_of(scalar, datatype);
  else
    factor.pointer = scalar;
  auto& communicator = *comm->communicator;
  *op = ncclRedOp_t(communicator.next_factor++);
  communicator.factors[*op] = factor;
  return ncclSuccess;
}
NCCL ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return comm && comm->communicator->factors.erase(op)
             ? ncclSuccess
             : fail(ncclInvalidArgument, "ncclRedOpDestroy : operator unknown to this communicator");
}
