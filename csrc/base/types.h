// The element types, reductions and collectives of the core, and their names.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace mscomm {

enum class Dtype : uint8_t {
  boolean,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  float8_e4m3fn,  // the float8 types are only moved, never reduced
  float8_e4m3fnuz,
  float8_e5m2,
  float8_e5m2fnuz,
  float8_e8m0fnu,
  object,  // the bytes of a Python object; used in messages only, never in collectives
};

enum class Op : uint8_t { sum, prod, min, max, avg, band, bor, bxor };

// The collectives that algorithms implement. Each row of the table in algo/registry.cc is for one of them.
enum class Collective : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
  scan,
  exscan,
};

// The function that the user called. Ranks compare it, and error texts name it. Most functions run the collective of the same
// name. The others run one or more collectives; see python/mscomm/collectives.py.
enum class Function : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
  scan,
  exscan,
  all_reduce_many,
  all_gather_v,
  reduce_scatter_v,
  gather_v,
  scatter_v,
  all_to_all_v,
  all_gather_object,
  broadcast_object,
  gather_object,
  scatter_object,
};

struct DtypeRow {
  std::string_view name;
  size_t bytes;
};

// The tables below are indexed by the enums above. The enum values are part of the wire format. `dtypes` has only array element
// types, so it has no row for Dtype::object.
inline constexpr std::array<DtypeRow, 20> dtypes{{
    {"bool", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"uint8", 1},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"complex64", 8},
    {"complex128", 16},
    {"float8_e4m3fn", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e5m2", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1},
}};
inline constexpr std::array<std::string_view, 8> ops{"sum", "prod", "min", "max", "avg", "band", "bor", "bxor"};
inline constexpr std::array<std::string_view, 21> functions{
    "all_reduce",       "all_gather",       "reduce_scatter", "broadcast", "reduce",       "gather",
    "scatter",          "all_to_all",       "barrier",        "scan",      "exscan",       "all_reduce_many",
    "all_gather_v",     "reduce_scatter_v", "gather_v",       "scatter_v", "all_to_all_v", "all_gather_object",
    "broadcast_object", "gather_object",    "scatter_object"};
inline constexpr auto collectives = std::span(functions).first<11>();  // the enum Function begins with the collectives

constexpr std::string_view name(Dtype dtype) {
  return dtype == Dtype::object ? "object" : dtypes[static_cast<size_t>(dtype)].name;
}
constexpr std::string_view name(Op op) { return ops[static_cast<size_t>(op)]; }
constexpr std::string_view name(Function function) { return functions[static_cast<size_t>(function)]; }
constexpr std::string_view name(Collective what) { return collectives[static_cast<size_t>(what)]; }
// Returns whether the collective has a root, which is the only rank that provides data, or the only rank that receives the
// result.
constexpr bool rooted(Collective what) {
  return what == Collective::broadcast || what == Collective::reduce || what == Collective::gather || what == Collective::scatter;
}
// Returns whether the collective divides x (or the root's x) into one part for each rank.
constexpr bool divides(Collective what) {
  return what == Collective::reduce_scatter || what == Collective::scatter || what == Collective::all_to_all;
}
// Returns whether the collective concatenates the x of all ranks.
constexpr bool gathers(Collective what) { return what == Collective::all_gather || what == Collective::gather; }
// Returns whether each rank's result combines the data of all ranks up to and including that rank (scan), or of all ranks before
// it (exscan).
constexpr bool scans(Collective what) { return what == Collective::scan || what == Collective::exscan; }
// Returns whether the collective combines elements with an operation.
constexpr bool reduces(Collective what) {
  return what == Collective::all_reduce || what == Collective::reduce_scatter || what == Collective::reduce || scans(what);
}
constexpr size_t size_of(Dtype dtype) { return dtype == Dtype::object ? 1 : dtypes[static_cast<size_t>(dtype)].bytes; }

}  // namespace mscomm
