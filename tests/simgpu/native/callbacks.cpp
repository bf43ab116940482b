// Callbacks of CUPTI: a tool subscribes to calls of the runtime and the driver, and its function runs before and after each.
#include "callback_names.inc"
#include "cupti.h"

struct CUpti_Subscriber_st {
  CUpti_CallbackFunc function = nullptr;
  void* data = nullptr;
};

namespace sim::cupti {
namespace {

constexpr unsigned kMostDomains = 16;

struct Subscription {
  std::mutex m;
  CUpti_Subscriber_st subscriber;
  bool domains[kMostDomains] = {};
  std::set<std::pair<int, uint32_t>> calls;
  std::atomic<bool> active{false};

  bool wants(CUpti_CallbackDomain domain, uint32_t cbid) const {
    return domains[domain % kMostDomains] || calls.count({domain, cbid});
  }
  // Kineto asks for good to be told of new contexts; that costs calls nothing.
  void update() {
    bool on = domains[CUPTI_CB_DOMAIN_RUNTIME_API] || domains[CUPTI_CB_DOMAIN_DRIVER_API];
    for (auto& [domain, cbid] : calls)
      on = on || domain == CUPTI_CB_DOMAIN_RUNTIME_API || domain == CUPTI_CB_DOMAIN_DRIVER_API;
    active = on && subscriber.function;
    update_any();
  }
  void clear() {
    subscriber = {};
    std::fill(std::begin(domains), std::end(domains), false);
    calls.clear();
    update();
  }
};

Subscription& subscription() {
  static auto* kept = new Subscription;
  return *kept;
}

template <size_t count>
const char* name_in(const char* const (&names)[count], uint32_t cbid) {
  return cbid < count ? names[cbid] : nullptr;
}

const char* name_of(CUpti_CallbackDomain domain, uint32_t cbid) {
  if (domain == CUPTI_CB_DOMAIN_RUNTIME_API) return name_in(runtime_names, cbid);
  if (domain == CUPTI_CB_DOMAIN_DRIVER_API) return name_in(driver_names, cbid);
  return nullptr;
}

void call_back(Call& call, CUpti_ApiCallbackSite site) {
  CUpti_Subscriber_st subscriber;
  {
    std::lock_guard<std::mutex> lock(subscription().m);
    if (subscription().wants(call.domain, call.cbid)) subscriber = subscription().subscriber;
  }
  if (!subscriber.function) return;
  int result = call.result;
  CUpti_CallbackData info{};
  info.callbackSite = site;
  info.functionName = name_of(call.domain, call.cbid);
  info.functionReturnValue = &result;
  info.correlationId = call.correlation;
  info.correlationData = &call.data;
  subscriber.function(subscriber.data, call.domain, call.cbid, &info);
}

}  // namespace

CUptiResult refusal() {
  std::string condition = text_setting("CUPTI");
  if (condition == "refused") return CUPTI_ERROR_INSUFFICIENT_PRIVILEGES;
  if (condition == "busy") return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
  return CUPTI_SUCCESS;
}

bool calls_back() { return subscription().active; }

uint32_t next_correlation() {
  static std::atomic<uint32_t> next{1};
  return next.fetch_add(1);
}

Call::Call(CUpti_CallbackDomain domain, uint32_t cbid) : domain(domain), cbid(cbid), correlation(next_correlation()) {
  traced = any.load(std::memory_order_relaxed);
  with_callbacks = traced && calls_back();
  if (with_callbacks) call_back(*this, CUPTI_API_ENTER);
  start = now_ns();
}
Call::~Call() {
  if (!traced) return;
  api_call(*this, now_ns());
  if (with_callbacks) call_back(*this, CUPTI_API_EXIT);
}

}  // namespace sim::cupti

using namespace sim;
using namespace sim::cupti;

CUPTI cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
CUPTI cuptiSubscribe(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc function, void* data) {
  if (auto error = refusal()) return error;
  auto& all = subscription();
  std::lock_guard<std::mutex> lock(all.m);
  if (all.subscriber.function) return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
  all.subscriber = {function, data};
  *handle = &all.subscriber;
  return CUPTI_SUCCESS;
}
CUPTI cuptiUnsubscribe(CUpti_SubscriberHandle) {
  std::lock_guard<std::mutex> lock(subscription().m);
  subscription().clear();
  return CUPTI_SUCCESS;
}
CUPTI cuptiEnableCallback(uint32_t on, CUpti_SubscriberHandle, CUpti_CallbackDomain domain, CUpti_CallbackId cbid) {
  auto& all = subscription();
  std::lock_guard<std::mutex> lock(all.m);
  if (on)
    all.calls.insert({domain, cbid});
  else
    all.calls.erase({domain, cbid});
  all.update();
  return CUPTI_SUCCESS;
}
CUPTI cuptiEnableDomain(uint32_t on, CUpti_SubscriberHandle, CUpti_CallbackDomain domain) {
  auto& all = subscription();
  std::lock_guard<std::mutex> lock(all.m);
  if (unsigned(domain) >= kMostDomains) return CUPTI_ERROR_INVALID_PARAMETER;
  all.domains[domain] = on;
  all.update();
  return CUPTI_SUCCESS;
}
CUPTI cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t cbid, const char** name) {
  *name = name_of(domain, cbid);
  return *name ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_PARAMETER;
}
CUPTI cuptiGetResultString(CUptiResult result, const char** text) {
  switch (result) {
    case CUPTI_SUCCESS:
      *text = "CUPTI_SUCCESS";
      break;
    case CUPTI_ERROR_INVALID_PARAMETER:
      *text = "CUPTI_ERROR_INVALID_PARAMETER";
      break;
    case CUPTI_ERROR_INSUFFICIENT_PRIVILEGES:
      *text = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES";
      break;
    case CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED:
      *text = "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED";
      break;
    case CUPTI_ERROR_NOT_SUPPORTED:
      *text = "CUPTI_ERROR_NOT_SUPPORTED";
      break;
    default:
      *text = "CUPTI_ERROR_UNKNOWN";
  }
  return CUPTI_SUCCESS;
}
CUPTI cuptiFinalize() {
  stop_all();
  std::lock_guard<std::mutex> lock(subscription().m);
  subscription().clear();
  return CUPTI_SUCCESS;
}
