#include "base/call.h"

#include <cstdio>

namespace mscomm {

std::string Signature::text() const {
  if (!valid()) return "a call that this version does not know";
  std::string text = std::string(name(function)) + " #" + std::to_string(number);
  if (what == Collective::barrier) return text;
  text += head ? " (ahead of the data: " : " (";
  text += std::string(name(dtype)) + "[";
  for (int i = 0; i < dims; i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  text += "]";
  if (reduces(what)) text += ", " + std::string(name(op));
  if (root >= 0) text += ", root " + std::to_string(root);
  if (digest) {
    char digits[32];
    std::snprintf(digits, sizeof digits, ", digest %08x", static_cast<unsigned>(digest >> 32 ^ digest));
    text += digits;
  }
  return text + ")";
}

std::string in_units(uint64_t bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) value /= 1024, unit++;
  char text[32];
  std::snprintf(text, sizeof text, value == static_cast<uint64_t>(value) ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

}  // namespace mscomm
