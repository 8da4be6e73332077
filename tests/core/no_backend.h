// Defines a backend that moves no data, for tests of the layers above the backends.
#pragma once

#include "backend/backend.h"

namespace mscomm {

struct NoBackend : Backend {
  void run(const Call&, const Wait&) override {}
  void shut_down() override {}
  void withdraw(const Call&) override {}
  void last_look() override {}
  void close() override {}
  void close_descriptors() override {}
};

}  // namespace mscomm
