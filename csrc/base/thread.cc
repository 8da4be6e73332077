#include "base/thread.h"

#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace mscomm {

std::unique_ptr<std::thread> start_thread(std::function<void()> function) {
  try {
    return std::make_unique<std::thread>(std::move(function));
  } catch (const std::system_error& error) {
    throw Error("MemoryError",
                std::string("cannot start a thread, because there is too little memory or ulimit -u is too low: ") +
                    std::strerror(error.code().value()));
  }
}

}  // namespace mscomm
