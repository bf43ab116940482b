// CUPTI: what its parts share.
#pragma once
#include "sim.h"

namespace sim::cupti {

// Why a tool may not use CUPTI, as the setting CUPTI says; CUPTI_SUCCESS if it may.
CUptiResult refusal();

// ---- activities.cpp
bool is_recorded(CUpti_ActivityKind kind);
bool is_recorded(CUpti_CallbackDomain domain, uint32_t cbid);
uint64_t stamp(int64_t ns);  // a time on the clock of the tool
int64_t session();           // how often the recording of kernels began
void put(const void* record, size_t bytes);
template <class Record>
void put(const Record& record) {
  static_assert(sizeof(Record) % 8 == 0);
  put(&record, sizeof record);
}
void put_external_ids(uint32_t correlation);  // those that the thread has pushed
void stop_all();

// ---- cupti.cpp
void api_call(const Call& call, int64_t end);

// ---- callbacks.cpp
bool calls_back();  // whether a tool has subscribed to calls
void update_any();  // after a change of what is recorded or called back

}  // namespace sim::cupti
#define CUPTI EXPORT CUptiResult
