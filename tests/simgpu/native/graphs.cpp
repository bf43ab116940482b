// CUDA graphs: what a stream captures becomes a plan, which is launched as one work.
#include <algorithm>

#include "sim.h"

namespace sim {
struct UserObject {
  void* data;
  cudaHostFn_t destroy;
  unsigned references;
};
}  // namespace sim

using namespace sim;

namespace {

void release(UserObject* object, unsigned count) {
  object->references -= std::min(count, object->references);
  if (object->references) return;
  if (object->destroy) object->destroy(object->data);
  delete object;
}

cudaStreamCaptureStatus status_of(const Capture* capture) {
  return !capture           ? cudaStreamCaptureStatusNone
         : capture->invalid ? cudaStreamCaptureStatusInvalidated
                            : cudaStreamCaptureStatusActive;
}

Graph* new_graph() {
  auto* graph = new Graph;
  graph->id = state().next_graph++;
  return graph;
}

cudaError_t begin(Stream* stream, Graph* graph, cudaStreamCaptureMode mode, std::vector<Node*> after) {
  if (stream == state().defaults[stream->device]) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture) return cudaErrorIllegalState;
  auto* capture = new Capture;
  capture->id = state().next_capture++;
  capture->origin = stream;
  capture->mode = mode;
  capture->streams.insert(stream);
  capture->graph = graph ? graph : new_graph();
  stream->capture = capture;
  stream->capture_after = std::move(after);
  state().captures.insert(capture);
  return cudaSuccess;
}

}  // namespace

CUDA cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy, unsigned references, unsigned) {
  RUNTIME(cudaUserObjectCreate, 11030);
  *object = reinterpret_cast<cudaUserObject_t>(new UserObject{data, destroy, references});
  return call.say(cudaSuccess);
}
CUDA cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  RUNTIME(cudaUserObjectRelease, 11030);
  release(reinterpret_cast<UserObject*>(object), count);
  return call.say(cudaSuccess);
}
CUDA cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle, unsigned count, unsigned flags) {
  RUNTIME(cudaGraphRetainUserObject, 11030);
  auto* object = reinterpret_cast<UserObject*>(handle);
  if (!(flags & cudaGraphUserObjectMove)) object->references += count;
  reinterpret_cast<Graph*>(graph)->objects.push_back(object);
  return call.say(cudaSuccess);
}
CUDA cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  RUNTIME(cudaStreamBeginCapture, 10000);
  ON_DEVICE;
  return call.say(begin(stream_of(stream), nullptr, mode, {}));
}
CUDA cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t* after,
                                   const cudaGraphEdgeData*, size_t count, cudaStreamCaptureMode mode) {
  RUNTIME(cudaStreamBeginCaptureToGraph, 12030);
  ON_DEVICE;
  auto* nodes = reinterpret_cast<Node* const*>(after);
  return call.say(begin(stream_of(stream), reinterpret_cast<Graph*>(graph), mode, {nodes, nodes + count}));
}
CUDA cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  RUNTIME(cudaStreamEndCapture, 10000);
  ON_DEVICE;
  auto* capture = stream_of(handle)->capture;
  if (!capture) return call.say(cudaErrorIllegalState);
  for (Stream* stream : capture->streams) {
    stream->capture = nullptr;
    stream->capture_after.clear();
  }
  state().captures.erase(capture);
  bool invalid = capture->invalid;
  *graph = invalid ? nullptr : reinterpret_cast<cudaGraph_t>(capture->graph);
  delete capture;
  return call.say(invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
CUDA cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  RUNTIME(cudaStreamIsCapturing, 10000);
  ON_DEVICE;
  *status = status_of(stream_of(stream)->capture);
  return call.say(cudaSuccess);
}
CUDA cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                              cudaGraph_t* graph, const cudaGraphNode_t** after, const cudaGraphEdgeData** edges,
                              size_t* count) {
  RUNTIME(cudaStreamGetCaptureInfo, 12030);
  ON_DEVICE;
  auto* stream = stream_of(handle);
  auto* capture = stream->capture;
  *status = status_of(capture);
  if (!capture) return call.say(cudaSuccess);
  if (id) *id = capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  if (after) *after = reinterpret_cast<const cudaGraphNode_t*>(stream->capture_after.data());
  if (edges) *edges = nullptr;
  if (count) *count = stream->capture_after.size();
  return call.say(cudaSuccess);
}
CUDA cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* after, const cudaGraphEdgeData*,
                                         size_t count, unsigned flags) {
  RUNTIME(cudaStreamUpdateCaptureDependencies, 12030);
  ON_DEVICE;
  auto* stream = stream_of(handle);
  if (!stream->capture) return call.say(cudaErrorIllegalState);
  if (flags == cudaStreamSetCaptureDependencies) stream->capture_after.clear();
  auto* nodes = reinterpret_cast<Node**>(after);
  stream->capture_after.insert(stream->capture_after.end(), nodes, nodes + count);
  return call.say(cudaSuccess);
}
CUDA cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  RUNTIME(cudaGraphCreate, 10000);
  LOCKED;
  *graph = reinterpret_cast<cudaGraph_t>(new_graph());
  return call.say(cudaSuccess);
}
CUDA cudaGraphDestroy(cudaGraph_t handle) {
  RUNTIME(cudaGraphDestroy, 10000);
  auto* graph = reinterpret_cast<Graph*>(handle);
  for (auto* object : graph->objects) release(object, 1);
  LOCKED;
  delete graph;
  return call.say(cudaSuccess);
}
CUDA cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  RUNTIME(cudaGraphGetNodes, 10000);
  LOCKED;
  auto& all = reinterpret_cast<Graph*>(handle)->nodes;
  if (nodes) {
    *count = std::min(*count, all.size());
    for (size_t i = 0; i < *count; ++i) nodes[i] = reinterpret_cast<cudaGraphNode_t>(all[i].get());
  } else {
    *count = all.size();
  }
  return call.say(cudaSuccess);
}
CUDA cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  RUNTIME(cudaGraphNodeGetType, 10000);
  switch (reinterpret_cast<Node*>(node)->op.kind) {
    case Kind::Kernel:
      *type = cudaGraphNodeTypeKernel;
      break;
    case Kind::Memcpy:
      *type = cudaGraphNodeTypeMemcpy;
      break;
    case Kind::Memset:
      *type = cudaGraphNodeTypeMemset;
      break;
    case Kind::Host:
      *type = cudaGraphNodeTypeHost;
      break;
    case Kind::Record:
      *type = cudaGraphNodeTypeEventRecord;
      break;
    default:
      *type = cudaGraphNodeTypeEmpty;
  }
  return call.say(cudaSuccess);
}
CUDA cudaGraphNodeGetDependencies(cudaGraphNode_t handle, cudaGraphNode_t* after, cudaGraphEdgeData*, size_t* count) {
  RUNTIME(cudaGraphNodeGetDependencies, 12030);
  LOCKED;
  auto& all = reinterpret_cast<Node*>(handle)->after;
  for (size_t i = 0; after && i < std::min(*count, all.size()); ++i)
    after[i] = reinterpret_cast<cudaGraphNode_t>(all[i]);
  *count = all.size();
  return call.say(cudaSuccess);
}
CUDA cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t handle, unsigned long long) {
  RUNTIME(cudaGraphInstantiateWithFlags, 11040);
  ON_DEVICE;
  auto* graph = reinterpret_cast<Graph*>(handle);
  auto* plan = new Plan;
  plan->id = graph->id;
  std::unordered_map<Node*, size_t> places;
  for (auto& node : graph->nodes) {
    Plan::Step step;
    step.op = node->op;
    step.op.graph_node = (uint64_t(graph->id) << 32) | (node->id + 1);
    step.op.stream_id = node->stream_id;
    step.on_first_stream = node->stream_id == graph->nodes.front()->stream_id;
    for (Node* before : node->after) {
      auto found = places.find(before);
      if (found != places.end()) step.after.push_back(found->second);
    }
    places[node.get()] = plan->steps.size();
    plan->steps.push_back(std::move(step));
  }
  *executable = reinterpret_cast<cudaGraphExec_t>(plan);
  return call.say(cudaSuccess);
}
CUDA cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
CUDA cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  RUNTIME(cudaGraphUpload, 10000);
  return call.say(cudaSuccess);
}
CUDA cudaGraphExecDestroy(cudaGraphExec_t executable) {
  RUNTIME(cudaGraphExecDestroy, 10000);
  LOCKED;
  delete reinterpret_cast<Plan*>(executable);
  return call.say(cudaSuccess);
}
CUDA cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  RUNTIME(cudaGraphLaunch, 10000);
  ON_DEVICE;
  Op op;
  op.kind = Kind::Graph;
  op.correlation = call.correlation;
  op.plan = std::make_shared<Plan>(*reinterpret_cast<Plan*>(executable));
  op.duration = op.plan->length();
  for (auto& step : op.plan->steps)
    if (step.op.meeting) step.op.meeting = nccl::another(*step.op.meeting);
  if (state().computes) state().launched_graphs.push_back(op.plan->id);
  return call.say(enqueue(stream_of(stream), std::move(op)));
}
