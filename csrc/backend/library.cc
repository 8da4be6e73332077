#include "backend/library.h"

namespace mscomm {

std::optional<VendorReduction> reduction_of(const Numbers& library, Dtype dtype, Op op) {
  const auto number = [&](Op one) { return library.operations[static_cast<size_t>(one)]; };
  VendorReduction found{library.types[static_cast<size_t>(dtype)], number(op)};
  if (dtype == Dtype::boolean) {
    const bool any = op == Op::sum || op == Op::max || op == Op::bor;
    const bool all = op == Op::prod || op == Op::min || op == Op::band;
    found = {library.byte, any ? number(Op::max) : all ? number(Op::min) : -1};
  } else if (dtype == Dtype::complex64 || dtype == Dtype::complex128) {
    const Dtype part = dtype == Dtype::complex64 ? Dtype::float32 : Dtype::float64;
    const bool by_parts = op == Op::sum || op == Op::avg;
    found = {library.types[static_cast<size_t>(part)], by_parts ? number(op) : -1, 2};
  }
  return found.type < 0 || found.op < 0 ? std::nullopt : std::optional(found);
}

}  // namespace mscomm
