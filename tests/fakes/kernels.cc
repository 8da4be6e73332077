#include "kernels.h"

#include <dlfcn.h>

#include <cstring>
#include <string>
#include <vector>

namespace fake {

namespace {

// Holds the functions of the library that kernels.py builds from device_code.cc.
struct Code {
  Code() {
    const std::string path = text("FAKE_CUDA_KERNELS", "");
    library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    kernel = reinterpret_cast<decltype(kernel)>(dlsym(library, "fake_kernel"));
    parameter_bytes = reinterpret_cast<decltype(parameter_bytes)>(dlsym(library, "fake_parameter_bytes"));
    addresses = reinterpret_cast<decltype(addresses)>(dlsym(library, "fake_addresses"));
    run = reinterpret_cast<decltype(run)>(dlsym(library, "fake_run"));
  }
  void* library = nullptr;
  int (*kernel)(const char* name) = nullptr;  // returns the kernel's number, or -1 if there is no such kernel
  size_t (*parameter_bytes)() = nullptr;
  // Calls `visit` for each address in the parameters. `bytes` is the number of bytes, starting at this address, that the kernel
  // can access.
  void (*addresses)(int kernel, void* parameters, void (*visit)(void* context, uint64_t* address, size_t bytes),
                    void* context) = nullptr;
  int (*run)(int kernel, const void* parameters, unsigned blocks, unsigned threads) = nullptr;
};

const Code& code() {
  static const Code code;
  return code;
}

constexpr Handle first_handle = 0x4e0000;

}  // namespace

bool can_run(const void* image) {
  constexpr unsigned char fatbin[] = {0x50, 0xed, 0x55, 0xba};
  return code().library && memcmp(image, fatbin, sizeof fatbin) == 0;
}

Handle kernel_named(const char* name) {
  const int kernel = code().library && name ? code().kernel(name) : -1;
  return kernel < 0 ? 0 : first_handle + static_cast<Handle>(kernel);
}

bool launch_kernel(Handle handle, unsigned blocks, unsigned threads, const void* parameters,
                   const std::shared_ptr<Stream>& stream) {
  if (!code().library || handle < first_handle || !blocks || threads > 1024 || !parameters) return false;
  const int kernel = static_cast<int>(handle - first_handle);
  auto batch = std::make_shared<std::vector<char>>(code().parameter_bytes());
  memcpy(batch->data(), parameters, batch->size());
  std::vector<Buffer> buffers;
  const auto find = [](void* context, uint64_t* address, size_t bytes) {
    static_cast<std::vector<Buffer>*>(context)->push_back(engine().find(*address, bytes));
  };
  code().addresses(kernel, batch->data(), find, &buffers);
  engine().count("launches", 1);
  stream->enqueue([=, device = stream->device()] {
    std::vector<char> here = *batch;  // a copy, because a graph can run this batch again
    struct Open {
      std::vector<std::shared_ptr<char>> memory;
      const std::vector<Buffer>& buffers;
      int device;
    } open{{}, buffers, device};
    const auto replace = [](void* context, uint64_t* address, size_t) {
      auto& open = *static_cast<Open*>(context);
      open.memory.push_back(engine().open(open.buffers[open.memory.size()], open.device));
      *address = reinterpret_cast<uint64_t>(open.memory.back().get());
    };
    code().addresses(kernel, here.data(), replace, &open);
    for (const auto& memory : open.memory)
      if (!memory) return;
    if (!code().run(kernel, here.data(), blocks, threads)) engine().violation("kernel", "a launch that the kernel does not know");
  });
  return true;
}

}  // namespace fake
