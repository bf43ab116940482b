// NCCL: reductions. The floats of each type are summed as double, integers as the 64 bits that wrap as theirs do.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "collectives.h"

namespace sim::nccl {
namespace {

// A float of `exponent` and `mantissa` bits; `finite` if it ends at its largest number, and has one NaN.
template <int exponent, int mantissa, bool finite = false>
struct Small {
  std::conditional_t<(exponent + mantissa > 7), uint16_t, uint8_t> bits = 0;

  static constexpr int kBias = (1 << (exponent - 1)) - 1, kMost = (1 << exponent) - 1;
  static constexpr unsigned kSign = 1u << (exponent + mantissa), kNan = kSign - 1,
                            kInfinity = finite ? kNan - 1 : unsigned(kMost) << mantissa;

  Small() = default;
  explicit Small(double value) {
    unsigned sign = std::signbit(value) ? kSign : 0;
    bits = decltype(bits)(sign | magnitude(std::fabs(value)));
  }
  explicit operator double() const {
    static const auto* values = table();
    return (*values)[bits];
  }

 private:
  static const std::vector<float>* table() {
    auto* values = new std::vector<float>;
    for (unsigned bits = 0; bits < 2 * kSign; ++bits)
      values->push_back(float(bits & kSign ? -decoded(bits - kSign) : decoded(bits)));
    return values;
  }
  static double decoded(unsigned raw) {
    int power = int(raw >> mantissa);
    if (finite ? raw == kNan : power == kMost) return !finite && raw == kInfinity ? INFINITY : NAN;
    double part = std::ldexp(raw & ((1 << mantissa) - 1), -mantissa);
    return power ? std::ldexp(1 + part, power - kBias) : std::ldexp(part, 1 - kBias);
  }
  // Rounds to even.
  static unsigned magnitude(double value) {
    constexpr int kDropped = 52 - mantissa;
    if (std::isnan(value)) return kNan;
    uint64_t raw;
    memcpy(&raw, &value, sizeof raw);
    if (int(raw >> 52) - 1023 < 1 - kBias) return unsigned(std::nearbyint(std::ldexp(value, kBias - 1 + mantissa)));
    raw = (raw + (uint64_t(1) << (kDropped - 1)) - 1 + (raw >> kDropped & 1)) >> kDropped;
    raw -= uint64_t(1023 - kBias) << mantissa;
    return raw < kInfinity ? unsigned(raw) : kInfinity;
  }
};
using Half = Small<5, 10>;
using Bfloat16 = Small<8, 7>;
using Float8e4m3 = Small<4, 3, true>;
using Float8e5m2 = Small<5, 2>;

template <class T>
constexpr bool is_integer = std::is_integral_v<T>;
template <class T>
using Wide = std::conditional_t<!is_integer<T>, double, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

template <class T>
Wide<T> widen(T value) {
  return Wide<T>(value);
}

template <class T>
T narrow(Wide<T> value) {
  return T(value);
}

// Calls a function with a value of the type.
template <class Function>
auto with_type(int datatype, Function function) {
  switch (datatype) {
    case ncclInt8:
      return function(int8_t{});
    case ncclUint8:
      return function(uint8_t{});
    case ncclInt32:
      return function(int32_t{});
    case ncclUint32:
      return function(uint32_t{});
    case ncclInt64:
      return function(int64_t{});
    case ncclUint64:
      return function(uint64_t{});
    case ncclFloat16:
      return function(Half{});
    case ncclBfloat16:
      return function(Bfloat16{});
    case ncclFloat8e4m3:
      return function(Float8e4m3{});
    case ncclFloat8e5m2:
      return function(Float8e5m2{});
    case ncclFloat64:
      return function(double{});
    default:
      return function(float{});
  }
}

template <class W>
W neutral(int op) {
  using Limits = std::numeric_limits<W>;
  constexpr bool real = Limits::has_infinity;
  switch (op) {
    case ncclProd:
      return 1;
    case ncclMax:
      return real ? -Limits::infinity() : Limits::lowest();
    case ncclMin:
      return real ? Limits::infinity() : Limits::max();
    default:
      return 0;
  }
}

template <class W>
void combine(W& sum, W value, int op) {
  switch (op) {
    case ncclProd:
      sum *= value;
      break;
    case ncclMax:
      sum = std::max(sum, value);
      break;
    case ncclMin:
      sum = std::min(sum, value);
      break;
    default:
      sum += value;
  }
}

}  // namespace

size_t size_of(int datatype) {
  return with_type(datatype, [](auto zero) { return sizeof zero; });
}

double value_of(const void* pointer, int datatype) {
  return with_type(datatype, [&](auto zero) {
    memcpy(&zero, pointer, sizeof zero);
    return double(widen(zero));
  });
}

void clear(char* sum, size_t bytes, const Task& task) {
  with_type(task.letter.datatype, [&](auto zero) {
    using W = Wide<decltype(zero)>;
    std::fill_n(reinterpret_cast<W*>(sum), bytes / sizeof zero, neutral<W>(task.letter.op));
  });
}

void add(char* sum, const char* part, size_t bytes, const Task& task, double factor) {
  int op = task.letter.op;
  with_type(task.letter.datatype, [&](auto zero) {
    using T = decltype(zero);
    auto* sums = reinterpret_cast<Wide<T>*>(sum);
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
      memcpy(&zero, part + i * sizeof(T), sizeof(T));
      auto value = widen(zero);
      combine(sums[i], factor == 1 ? value : Wide<T>(value * factor), op);
    }
  });
}

void store(char* target, const char* sum, size_t bytes, const Task& task, int ranks) {
  bool mean = task.letter.op == ncclAvg;
  with_type(task.letter.datatype, [&](auto zero) {
    using T = decltype(zero);
    auto* sums = reinterpret_cast<const Wide<T>*>(sum);
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
      zero = narrow<T>(mean ? sums[i] / Wide<T>(ranks) : sums[i]);
      memcpy(target + i * sizeof(T), &zero, sizeof(T));
    }
  });
}

}  // namespace sim::nccl
