// The Python module mscomm._core. It converts arguments, releases the GIL, and calls the core. python/mscomm/_core.pyi lists its
// functions with their types.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <ranges>
#include <utility>

#include "algo/algorithm.h"
#include "backend/hccl.h"
#include "backend/nccl.h"
#include "base/compress.h"
#include "base/reduce.h"
#include "device/acl.h"
#include "device/cuda.h"
#include "net/certificates.h"
#include "net/tls.h"
#include "src/calls.h"
#include "src/dlpack.h"
#include "src/functions.h"
#include "src/group.h"
#include "src/objects.h"
#include "src/process_group.h"
#include "src/python.h"
#include "src/works.h"
#include "transport/arena.h"

using namespace mscomm;

namespace {

// Creates a heap. Returns the heap, and the descriptor that the peers use to map it. The caller must close the descriptor.
std::pair<std::shared_ptr<Heap>, int> make_heap(size_t bytes, bool own_tmpfs) {
  Descriptor fd(make_memory("mscomm-heap", bytes, own_tmpfs));
  auto heap = std::make_shared<Heap>(Mapping(fd.get(), bytes));
  return {std::move(heap), fd.release()};
}

py::object allocate(const std::shared_ptr<Heap>& heap, size_t bytes) {
  void* memory = unlocked([&] { return heap->allocate(bytes); });  // without the GIL, because clearing the pages takes time
  if (!memory) return py::none();
  // The array keeps the heap alive. The memory is released when the last view of the array is gone.
  struct Owner {
    std::shared_ptr<Heap> heap;
    void* memory;
    size_t bytes;
  };
  const py::capsule release(new Owner{heap, memory, bytes}, [](void* pointer) {
    const std::unique_ptr<Owner> owner(static_cast<Owner*>(pointer));
    const auto give_back = [&] { owner->heap->release(owner->memory); };
    try {
      // Freeing many pages takes the kernel a long time, so let other threads run in the meantime.
      if (owner->bytes >= give_back_from && !python_is_ending()) unlocked(give_back);
      else give_back();
    } catch (const std::bad_alloc&) {
      // No exception may escape from this function, so the memory stays allocated.
    }
  });
  return py::array_t<uint8_t>({bytes}, {size_t{1}}, static_cast<uint8_t*>(memory), release);
}

// The fields of Prices or of Cost, in their order.
using Five = std::array<double, 5>;

// The key of a link, and whether this rank begins the handshake.
using SecretPair = std::pair<py::bytes, bool>;

std::optional<Secret> secret_of(const std::optional<SecretPair>& pair) {
  if (!pair) return {};
  const std::string_view key = pair->first;
  Secret secret{.connects = pair->second};
  if (key.size() != secret.key.size())
    throw Error("ValueError", "secret: the key has " + std::to_string(key.size()) + " bytes, but it must have " +
                                  std::to_string(secret.key.size()));
  std::ranges::copy(key, secret.key.begin());
  return secret;
}

// Raises Python's OSError, with the errno if a system call failed.
[[noreturn]] void raise_os_error(const Stream::Broken& broken) {
  const py::object kind = py::reinterpret_borrow<py::object>(broken.closed ? PyExc_ConnectionResetError : PyExc_OSError);
  const py::object error = kind(broken.error, broken.why);
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());  // for some values of errno, Python makes a subclass of OSError
  throw py::error_already_set();
}

template <typename Function>
auto as_os_error(const Function& function) {
  try {
    return function();
  } catch (const Stream::Broken& broken) {
    raise_os_error(broken);
  }
}

// The source (a rank of the group) and the tag of a message.
using Received = std::pair<int, int64_t>;

Received received(const Matched& matched) { return {matched.peer, matched.tag}; }

Message message(bool sends, int peer, int64_t tag, int dtype, py::array& array) {
  // A send only reads the data. But Message has one pointer for both directions, which is not const, because a recv writes.
  void* data = sends ? const_cast<void*>(array.data()) : array.mutable_data();
  return {sends, peer, tag, static_cast<Dtype>(dtype), data, static_cast<size_t>(array.nbytes())};
}

// Returns the peer and the tag of the message. spent_s: how many of the timeout_s seconds have already passed.
template <bool sends>
Received run_message(Group& group, int peer, int64_t tag, int dtype, py::array array, double timeout_s, double spent_s) {
  const Message one = message(sends, peer, tag, dtype, array);
  return received(group.called([&] { return group.communicator->run({&one, 1}, Deadline(timeout_s, spent_s)).front(); }));
}

// The recv is started first, so that it is already waiting if this rank sends the message to itself.
Received send_and_receive(Group& group, int to, int64_t send_tag, int x_dtype, py::array x, int from, int64_t recv_tag,
                          int out_dtype, py::array out, double timeout_s, double spent_s) {
  const Message both[] = {message(false, from, recv_tag, out_dtype, out), message(true, to, send_tag, x_dtype, x)};
  return received(group.called([&] { return group.communicator->run(both, Deadline(timeout_s, spent_s)).front(); }));
}

template <bool sends>
Handle start_message(Group& group, int peer, int64_t tag, int dtype, py::array array, double timeout_s, double spent_s) {
  const Message one = message(sends, peer, tag, dtype, array);
  const auto kept = std::make_shared<PreparedCall>();
  kept->x.emplace(Array{.given = std::move(array)});
  return start(group.ready(), kept, one, Deadline(timeout_s, spent_s));
}

// Returns the Dtype of an array, using the name that NumPy or ml_dtypes gives the dtype.
Dtype dtype_of(const py::array& array) {
  const auto named = array.dtype().attr("name").cast<std::string>();
  for (size_t i = 0; i < dtypes.size(); i++)
    if (dtypes[i].name == named) return static_cast<Dtype>(i);
  throw py::type_error("mscomm: arrays of " + named + " cannot be packed");
}

// Returns the elements of an array. Throws unless the array is in C order and has `count` elements.
Elements elements_of(py::array& array, size_t count) {
  if (!(array.flags() & py::array::c_style) || static_cast<size_t>(array.size()) != count)
    throw py::value_error("mscomm: the arrays must be contiguous, and have the same number of elements");
  return {array.mutable_data(), dtype_of(array)};
}

void compress_array(py::array x, py::array residual, py::array narrow, double largest) {
  const size_t count = x.size();
  const Elements from = elements_of(x, count), owed = elements_of(residual, count), to = elements_of(narrow, count);
  if (owed.dtype != from.dtype) throw py::type_error("mscomm: the residual must have the dtype of x");
  unlocked([&] { compress(from, owed.data, to, largest, count); });
}

void expand_array(py::array narrow, py::array out) {
  const size_t count = narrow.size();
  const Elements from = elements_of(narrow, count), to = elements_of(out, count);
  unlocked([&] { expand(from, to, count); });
}

// The bucket element at which each part begins, or nullopt if each part begins where the previous one ends.
using Begins = std::optional<std::vector<uint64_t>>;

Packing packing_of(bool packs, py::array& bucket, std::vector<py::array>& parts, double scale, const Begins& begins) {
  if (begins && begins->size() != parts.size()) throw py::value_error("mscomm: begins must have one number for each part");
  Packing packing{packs, dtype_of(bucket), dtype_of(bucket), bucket.mutable_data(), {}, scale};
  if (!parts.empty()) packing.dtype = dtype_of(parts.front());
  const uint64_t room = bucket.size();
  uint64_t end = 0;
  for (size_t i = 0; i < parts.size(); i++) {
    if (!parts[i].dtype().equal(parts.front().dtype()))
      throw py::type_error("mscomm: all parts of a bucket must have the same dtype");
    const uint64_t at = begins ? (*begins)[i] : end;
    const uint64_t count = parts[i].size();
    if (at < end) throw py::value_error("mscomm: the parts must be in the order of the bucket, and must not overlap");
    if (at > room || count > room - at) throw py::value_error("mscomm: the parts do not fit into the bucket");
    packing.parts.push_back({packs ? const_cast<void*>(parts[i].data()) : parts[i].mutable_data(), at, count});
    end = at + count;
  }
  return packing;
}

void pack(Group& group, py::array bucket, std::vector<py::array> parts, uintptr_t stream, double scale, const Begins& begins,
          std::optional<py::array> residual, double largest) {
  Packing packing = packing_of(true, bucket, parts, scale, begins);
  if (residual) {
    if (dtype_of(*residual) != Dtype::float32) throw py::type_error("mscomm: the residual must be float32");
    const uint64_t end = packing.parts.empty() ? 0 : packing.parts.back().begin + packing.parts.back().count;
    if (static_cast<uint64_t>(residual->size()) < end) throw py::value_error("mscomm: the residual is shorter than the bucket");
    if (!(largest > 0)) throw py::value_error("mscomm: largest must be a positive number");
    packing.residual = residual->mutable_data();
    packing.largest = largest;
  }
  unlocked([&] { group.communicator->device().pack(packing, reinterpret_cast<StreamHandle>(stream)); });
}

void unpack(Group& group, py::array bucket, std::vector<py::array> parts, uintptr_t stream, double scale, const Begins& begins) {
  const Packing packing = packing_of(false, bucket, parts, scale, begins);
  unlocked([&] { group.communicator->device().pack(packing, reinterpret_cast<StreamHandle>(stream)); });
}

void clear(Group& group, py::array memory, uintptr_t stream) {
  if (!(memory.flags() & py::array::c_style)) throw py::value_error("mscomm: only contiguous memory can be cleared");
  void* const begin = memory.mutable_data();
  const size_t bytes = memory.nbytes();
  unlocked([&] { group.communicator->device().clear(begin, bytes, reinterpret_cast<StreamHandle>(stream)); });
}

std::vector<py::dict> calls(const Group& group, uint64_t after) {
  static constexpr const char* states[] = {"inside", "done", "failed"};
  std::vector<py::dict> list;
  for (const Record& record : group.founded.recorder().all(after)) {
    list.push_back(py::dict(py::arg("number") = record.signature.number, py::arg("call") = record.signature.text(),
                            py::arg("state") = states[static_cast<int>(record.state)], py::arg("began") = record.began_s,
                            py::arg("took") = record.took_s));
  }
  return list;
}

py::handle given_or_null(const py::object& object) { return object.is_none() ? py::handle() : py::handle(object); }

Array array_of(const Group& group, int function, py::object x, const std::string& argument, const py::object& stream) {
  Array array = described(group.ready(), static_cast<Function>(function), argument, std::move(x), given_or_null(stream));
  array.memory = memory_of(array);  // keeps the memory alive until a call uses it; see PreparedCall::hold_memory
  return array;
}

PreparedCall prepare(const Group& group, int function, const py::object& x, py::object out, std::optional<int> what,
                     const py::object& op, const py::object& root, const py::object& stream,
                     std::optional<std::vector<uint64_t>> rows, std::optional<std::vector<uint64_t>> recv_rows, uint64_t digest,
                     bool head, const std::optional<std::pair<py::tuple, int>>& told, const std::string& out_argument) {
  const Wanted wanted{.function = static_cast<Function>(function),
                      .what = static_cast<Collective>(what.value_or(function)),
                      .op = given_or_null(op),
                      .root = given_or_null(root),
                      .stream = given_or_null(stream),
                      .out_argument = out_argument,
                      .rows = std::move(rows),
                      .recv_rows = std::move(recv_rows),
                      .digest = digest,
                      .head = head};
  std::optional<Array> array;
  if (py::isinstance<Array>(x)) array = x.cast<const Array&>();
  else if (!x.is_none()) array = described(group.ready(), wanted.function, "x", x, wanted.stream);
  std::optional<std::pair<Shape, Dtype>> model;
  if (told) model.emplace(shape_of(told->first), static_cast<Dtype>(told->second));
  PreparedCall ready = prepared(group.ready(), wanted, std::move(array), std::move(out), model);
  // The properties `source` and `target` return this memory, also if the user assigns other memory to the arrays meanwhile.
  for (auto* one : {&ready.x, &ready.target})
    if (*one) (*one)->memory = memory_of(**one);
  return ready;
}

// The places where a library may be. Each place has an origin, a path and a kind: "usual", "loaded" or "must" (see Candidate in
// csrc/base/dynlib.h).
using Places = std::vector<std::tuple<std::string, std::string, std::string>>;

std::vector<Candidate> candidates_of(const Places& places) {
  std::vector<Candidate> candidates;
  for (const auto& [origin, path, kind] : places) {
    using Kind = Candidate::Kind;
    candidates.push_back({origin, path, kind == "must" ? Kind::must : kind == "loaded" ? Kind::loaded : Kind::usual});
  }
  return candidates;
}

// image: for tests, a kernel image that replaces the one in this build. The function copies the image and never frees the copy,
// because the driver may need it until the process ends.
std::shared_ptr<Runtime> open_cuda_at(const Places& places, const std::optional<py::bytes>& image) {
  const auto* const kept = image ? new std::string(*image) : nullptr;
  return unlocked([&]() -> std::shared_ptr<Runtime> {
    if (!kept) return open_cuda(candidates_of(places));
    const auto* const bytes = reinterpret_cast<const unsigned char*>(kept->data());
    return open_cuda(candidates_of(places), {{bytes, kept->size()}, kept->empty() ? "" : "a given image"});
  });
}

template <typename Names>
std::vector<std::string> as_strings(const Names& names) {
  return {names.begin(), names.end()};
}

// Returns whether a Python object has its C++ object. pybind11's own function crashes if the object has no layout yet: when the
// first object of a Python subclass is made, pybind11 allocates memory between the two steps, and a collection may run there.
bool has_cpp_object(PyObject* self) {
  const auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  return (instance->simple_layout || instance->nonsimple.status) && py::detail::is_holder_constructed(self);
}

// Lets the garbage collector see the objects that a Work refers to.
void collects_cycles(PyHeapTypeObject* made) {
  PyTypeObject& type = made->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return has_cpp_object(self) ? py::handle(self).cast<const Handle&>().traverse(visit, arg) : 0;
  };
  type.tp_clear = [](PyObject* self) {
    if (has_cpp_object(self)) py::handle(self).cast<Handle&>().clear();
    return 0;
  };
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of mscomm; use the mscomm package instead.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });

  // The first call of get() gives up the GIL, and takes it back in a destructor. If a daemon thread made this call while the
  // process exits, the process would be aborted; see src/python.h.
  (void)py::detail::npy_api::get();
  module.attr("version") = MSCOMM_VERSION;
  module.attr("max_dims") = max_dims;
  module.attr("any_source") = any_source;
  module.attr("any_tag") = any_tag;
  module.attr("last_tag") = last_tag;
  module.attr("collectives") = as_strings(collectives);
  module.attr("ops") = as_strings(ops);
  module.def("dtypes", [] { return as_strings(std::views::transform(dtypes, &DtypeRow::name)); });
  module.def("itemsize", [](int dtype) { return dtypes.at(static_cast<size_t>(dtype)).bytes; });
  module.attr("object_dtype") = static_cast<int>(Dtype::object);
  module.def("supports", [](int dtype, int op) { return supports(static_cast<Dtype>(dtype), static_cast<Op>(op)); });
  module.def("compress", compress_array);
  module.def("expand", expand_array);
  module.attr("max_depth") = max_depth;
  module.def("pack_object", &pack_object);
  module.def("unpack_object", &unpack_object);
  module.def("algorithms", [] {
    std::vector<py::tuple> rows;
    for (const Algorithm& row : algorithms())
      rows.push_back(
          py::make_tuple(std::string(name(row.what)), std::string(row.name), std::string(name(row.carrier)), row.own_order));
    return rows;
  });
  module.attr("functions") = as_strings(functions);
  module.def("mismatch", &mismatch);
  module.def("make_heap", &make_heap);
  module.def("describe_memory", &describe_memory);

  py::class_<Failure>(module, "Failure")
      .def_property_readonly("error", [](const Failure& failure) { return failure.error; })
      .def_readonly("is_verdict", &Failure::is_verdict)
      .def_readonly("number", &Failure::number);

  py::class_<Heap, std::shared_ptr<Heap>>(module, "Heap")
      .def("allocate", &allocate)
      .def("in_use", &Heap::in_use)
      .def("kept", &Heap::kept)
      .def("retire", &Heap::retire)
      .def("reserve_control", [](Heap& heap, int size) { return Arena::reserve(heap, size); })
      .def("release_control", [](Heap& heap, uint64_t control, int size) { Arena::release(heap, control, size); })
      .def("abandon_control", [](Heap& heap, uint64_t control, int size) { Arena::abandon(heap, control, size); });

  py::class_<Peers, std::shared_ptr<Peers>>(module, "Peers")
      .def(py::init([](int rank, std::vector<std::string> names, std::vector<int> hosts, const std::vector<int>& pidfds,
                       std::shared_ptr<Heap> heap, const std::vector<int>& heap_fds) {
             std::vector<Descriptor> owned(pidfds.begin(), pidfds.end());
             std::vector<Mapping> others(heap_fds.size());
             for (size_t peer = 0; heap && peer < heap_fds.size(); peer++)
               if (heap_fds[peer] >= 0) others[peer] = Mapping(heap_fds[peer], check_memory(heap_fds[peer]));
             auto heaps = heap ? std::make_shared<Heaps>(rank, std::move(heap), std::move(others)) : nullptr;
             return std::make_shared<Peers>(std::move(names), std::move(hosts), std::move(owned), std::move(heaps));
           }),
           py::kw_only(), py::arg("rank"), py::arg("names"), py::arg("hosts"), py::arg("pidfds"), py::arg("heap"),
           py::arg("heap_fds"));

  py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime")
      .def("version", &Runtime::version)
      .def("devices", &Runtime::devices)
      .def("device_name", &Runtime::device_name)
      .def("uuid", &Runtime::uuid)
      .def("device_of",
           [](Runtime& runtime, uintptr_t memory) { return runtime.device_of(reinterpret_cast<const void*>(memory)); })
      .def("kernels", [](Runtime& runtime, int device) { return unlocked([&] { return runtime.kernels(device); }); })
      .def("use", [](Runtime& runtime, int device) { unlocked([&] { runtime.use(device); }); });
  py::class_<Vendor, std::shared_ptr<Vendor>>(module, "Vendor")
      .def("name", &Vendor::name)
      .def("version", &Vendor::version)
      .def("path", &Vendor::path)
      .def("origin", &Vendor::origin)
      .def("refuses",
           [](const Vendor& vendor, int dtype, int op) { return vendor.refuses(static_cast<Dtype>(dtype), static_cast<Op>(op)); })
      .def("make_id", [](Vendor& vendor, Runtime& runtime, int device) {
        const Runtime::Current current(runtime, device);
        return py::bytes(vendor.make_id());
      });
  module.def("open_cuda", &open_cuda_at, py::arg("places"), py::kw_only(), py::arg("image") = py::none());
  module.def("embedded_image", [] {
    const Image image = embedded_image();
    return py::make_tuple(py::bytes(reinterpret_cast<const char*>(image.bytes.data()), image.bytes.size()),
                          std::string(image.architectures));
  });
  module.def("describe_dlpack", &describe_dlpack);
  module.def("tls_version", [] { return unlocked(tls_version); });
  module.def(
      "check_certificates",
      [](const std::string& bundle, const std::string& password, const std::string& authorities,
         const std::optional<std::string>& revoked, bool server, const std::string& uri,
         const std::string& key_password) -> std::optional<py::tuple> {
        const CertificateFiles files{bundle, password, authorities, revoked, server, uri};
        explicit_bzero(const_cast<char*>(password.data()), password.size());  // pybind's copy of the password
        const auto made = unlocked([&] { return check_certificates(files, key_password); });
        if (!made) return {};
        return py::make_tuple(py::bytes(made->own), py::bytes(made->trusted), made->expires);
      },
      py::kw_only(), py::arg("bundle"), py::arg("password"), py::arg("authorities"), py::arg("revoked"), py::arg("server"),
      py::arg("uri"), py::arg("key_password"));
  // Its functions hold the GIL, so that one thread can receive while another sends.
  py::class_<Tls>(module, "Tls")
      .def(py::init([](int fd, const SecretPair& pair) { return std::make_unique<Tls>(fd, *secret_of(pair)); }))
      .def("shake_hands", [](Tls& tls) { return as_os_error([&] { return tls.shake_hands(); }); })
      .def("send",
           [](Tls& tls, const py::buffer& data) {
             const py::buffer_info bytes = data.request();
             return as_os_error([&] { return tls.send(bytes.ptr, static_cast<size_t>(bytes.size * bytes.itemsize)); });
           })
      .def("receive",
           [](Tls& tls, size_t most) -> std::optional<py::bytes> {
             std::string bytes(std::min(most, size_t{256} << 10), '\0');
             try {
               bytes.resize(tls.receive(bytes.data(), bytes.size()));
             } catch (const Stream::Broken& broken) {
               if (broken.closed) return py::bytes();
               raise_os_error(broken);
             }
             if (bytes.empty()) return {};
             return py::bytes(bytes);
           })
      .def_property_readonly("pending", &Tls::pending)
      .def_property_readonly("flushed", &Tls::flushed)
      .def("close", [](Tls& tls) { return as_os_error([&] { return tls.close(); }); });
  module.def("open_acl", [](const Places& places, std::vector<std::string> visible) {
    return std::shared_ptr(open_acl(candidates_of(places), std::move(visible)));
  });
  module.def("open_hccl", [](const Places& collectives, const Places& communicators, const std::string& soc) {
    return std::shared_ptr(open_hccl(candidates_of(collectives), candidates_of(communicators), soc));
  });
  module.def("open_nccl",
             [](const Places& places) { return unlocked([&] { return std::shared_ptr(open_nccl(candidates_of(places))); }); });

  py::class_<Completions, std::shared_ptr<Completions>>(module, "Completions")
      .def(py::init<>())
      .def_property_readonly("fd", &Completions::fd)
      .def("add",
           [](Completions& completions, uint64_t token) {
             completions.expect();
             completions.add(token);
           })
      .def("take", &Completions::take);
  py::class_<Handle>(module, "Work", R"(A call that was started with `async_op=True`, and runs while the caller continues.

A Work keeps x and out alive. Do not touch x and out until the call has completed. When wait() has returned, out is
complete, except on a device (see below). If the call fails and the Work is dropped before wait() was called, the next
call on the group raises the error.

For arrays on a device, wait() without a timeout returns at once. Operations that are enqueued later on the array library's
current stream wait for the call. With a timeout, wait() returns when the device has completed the call.

>>> work = mscomm.all_reduce(x, async_op=True)
>>> y = work.wait())",
                     py::custom_type_setup(collects_cycles))
      .def(py::init<>())
      .def("wait", &Handle::wait, py::arg("timeout") = py::none(),
           R"(Wait until the call has completed, and return its result. If the call has failed, raise its error.

Raise TimeoutError if the call has not completed in time; the call then continues. timeout: a number of seconds or a
timedelta, or 0 to only look; None sets no limit. For a call on the device, wait() without a timeout returns at once, and
the array library's current stream waits for the call.)")
      .def("done", &Handle::done, R"(Return whether the call has completed, with or without an error.

If it has completed without an error, out holds the result.)")
      .def("is_completed", &Handle::done, "Do the same as done().")
      .def("exception", &Handle::exception, "Return the error of a call that has failed, otherwise None.")
      .def("cancel", &Handle::cancel, R"(Give up a recv for which no message has come yet. Return whether it was given up.

Then done() is True, wait() raises concurrent.futures.CancelledError, and out is unchanged. The group goes on, and a later recv
gets the message, if it still comes. A send, a collective call, and a recv whose message has come go on, and the result is
False: wait for them. cancel() does not wait for other ranks.)")
      .def(
          "__await__", [](const py::object& work) { return call_python(attribute_of("mscomm.works", "awaited"), work); },
          "Let a coroutine of asyncio wait: `result = await work`.")
      .def("__repr__", &Handle::repr)
      .def("_join", &Handle::join)
      .def("_failed", &Handle::failed)
      .def("_when_ended", &Handle::when_ended)
      .def("_hurry", &Handle::hurry)
      .def("matched", [](const Handle& handle) {
        const auto matched = handle.matched();
        return matched ? std::optional(received(*matched)) : std::nullopt;
      });

  py::class_<Array>(module, "Array")
      .def_property_readonly("shape", [](const Array& array) { return as_tuple(array.shape); })
      .def_property_readonly("dtype", [](const Array& array) { return static_cast<int>(*array.dtype); })
      .def_property_readonly("on_device", [](const Array& array) { return array.backend != nullptr; })
      .def_readonly("given", &Array::given);
  py::class_<PreparedCall, std::shared_ptr<PreparedCall>>(module, "Call")
      .def_property_readonly("function", [](const PreparedCall& call) { return static_cast<int>(call.call.signature.function); })
      .def("result", &PreparedCall::result)
      .def_property_readonly("result_fills_out", &PreparedCall::result_fills_out)
      .def_property_readonly("source",
                             [](const PreparedCall& call) { return call.x->packed ? call.x->packed : memory_of(*call.x); })
      .def_property_readonly("target", [](const PreparedCall& call) { return memory_of(*call.target); });

  module.def("collective", [](int what, const py::function& model, const std::string& signature) {
    return collective_function(static_cast<Collective>(what), model, signature);
  });
  module.def("message", &message_function);
  module.def("set_world", &set_world);
  module.def("usual_all_reduce", &usual_all_reduce);

  py::class_<Layout>(module, "Layout")
      .def(py::init([](const std::vector<int>& hosts, int rank, const Forced& forced, const std::optional<Five>& prices) {
             if (!prices) return Layout(hosts, rank, forced);
             const auto [latency, message, byte, crowded, copied] = *prices;
             return Layout(hosts, rank, forced, {latency, message, byte, crowded, copied});
           }),
           py::kw_only(), py::arg("hosts"), py::arg("rank"), py::arg("forced"), py::arg("prices") = py::none())
      .def_property_readonly("prices",
                             [](const Layout& layout) {
                               const Prices& prices = layout.prices;
                               return Five{prices.latency_us, prices.message_us, prices.byte_ns, prices.crowded_byte_ns,
                                           prices.copied_byte_ns};
                             })
      .def_readonly("rank", &Layout::rank)
      .def_property_readonly("at_home", &Layout::at_home)
      .def_readonly("arena", &Layout::arena)
      .def_readonly("mesh", &Layout::mesh)
      .def_property_readonly("partners", &Layout::partners)
      .def("allows",
           [](const Layout& layout, const std::string& carrier) {
             return layout.allows(static_cast<Carrier>(std::ranges::find(carriers, carrier) - carriers.begin()));
           })
      .def("rows", [](const Layout& layout,
                      int what) { return as_strings(std::views::transform(layout.rows.at(what), &Algorithm::name)); })
      .def("chosen",
           [](const Layout& layout, int what, size_t size) {
             (void)layout.rows.at(what);  // throws if there is no such collective
             return layout.chosen(static_cast<Collective>(what), size).name;
           })
      .def("cost", [](const Layout& layout, int what, const std::string& algorithm, size_t size) -> std::optional<Five> {
        for (const Algorithm& row : algorithms())
          if (row.what == static_cast<Collective>(what) && row.name == algorithm && row.cost) {
            const Cost cost = row.cost(layout, static_cast<double>(size));
            return Five{cost.latencies, cost.messages, cost.bytes, cost.crowded, cost.copied};
          }
        return std::nullopt;  // for example, an algorithm that only MSCOMM_ALGO can choose
      });

  py::class_<CallNumbers>(module, "CallNumbers")
      .def("__enter__",
           [](py::object self) {
             self.cast<CallNumbers&>().enter();
             return self;
           })
      .def("__exit__",
           [](CallNumbers& numbers, const py::object& type, const py::object&, const py::object&) {
             numbers.leave();
             if (!type.is_none()) numbers.give_up();
           })
      .def_property_readonly("next", &CallNumbers::next);

  py::class_<Group>(module, "Group")
      .def(py::init([](std::string name, const std::shared_ptr<Peers>& peers, std::vector<int> ranks, unsigned epoch,
                       const Layout& layout, uint64_t control, bool spin, const std::vector<int>& links, int news_fd,
                       const std::vector<std::optional<SecretPair>>& secrets) {
             std::vector<Descriptor> owned(links.begin(), links.end());
             std::vector<std::optional<Secret>> keys;
             for (const auto& pair : secrets) keys.push_back(secret_of(pair));
             Founding founding{std::move(name),  std::move(ranks), layout,          epoch, control, spin,
                               std::move(owned), std::move(keys),  copy_of(news_fd)};
             return unlocked([&] { return std::make_unique<Group>(std::move(founding), peers); });
           }),
           py::kw_only(), py::arg("name"), py::arg("peers"), py::arg("ranks"), py::arg("epoch"), py::arg("layout"),
           py::arg("control"), py::arg("spin"), py::arg("links"), py::arg("news_fd"), py::arg("secrets") = py::tuple())
      .def_property_readonly("layout", [](const Group& group) -> const Layout& { return group.founded.host().layout(); })
      .def("run",
           [](Group& group, const PreparedCall& prepared, double timeout_s, CallNumbers* numbers) {
             forget_ended(group.ready());
             run(group.ready(), Call(prepared.call), timeout_s, numbers);
           })
      .def("start", [](Group& group, std::shared_ptr<PreparedCall> call, double timeout_s, CallNumbers* numbers,
                       bool part) { return start(group.ready(), std::move(call), timeout_s, numbers, part); })
      .def("join_device",
           [](Group& group, std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id,
              double timeout_s, const py::function& check) {
             unlocked([&] {
               group.founded.join_device(std::move(vendor), std::move(runtime), device, id, Deadline(timeout_s), [&check] {
                 std::optional<py::gil_scoped_acquire> gil;
                 stopping_at_exit([&] { gil.emplace(); });
                 check_signals();
                 call_python(check);
               });
             });
           })
      .def("order",
           [](Group& group, uint64_t number, uintptr_t stream) {
             group.called([&] { group.communicator->device().order(number, reinterpret_cast<StreamHandle>(stream)); });
           })
      .def("pack", &pack, py::arg("bucket"), py::arg("parts"), py::arg("stream"), py::kw_only(), py::arg("scale") = 1.0,
           py::arg("begins") = py::none(), py::arg("residual") = py::none(),
           py::arg("largest") = std::numeric_limits<double>::infinity())
      .def("unpack", &unpack, py::arg("bucket"), py::arg("parts"), py::arg("stream"), py::kw_only(), py::arg("scale") = 1.0,
           py::arg("begins") = py::none())
      .def("clear", &clear)
      .def("packs",
           [](const Group& group, int dtype, int bucket) {
             return group.communicator->converts(static_cast<Dtype>(dtype), static_cast<Dtype>(bucket));
           })
      .def("join_python",
           [](py::object self, py::object python, double timeout_s, py::dict libraries, py::str backend, int device, bool noted) {
             auto& group = self.cast<Group&>();
             if (group.calls) throw Error("RuntimeError", "mscomm: join_python was called before on this group");
             group.calls = std::make_unique<Calls>(
                 Calls{&group, self, timeout_s, std::move(python), std::move(libraries), std::move(backend), device, noted});
           })
      .def("set_timeout", [](const Group& group, double timeout_s) { group.ready().timeout_s = timeout_s; })
      .def("array", &array_of, py::arg("function"), py::arg("x"), py::kw_only(), py::arg("argument") = "x",
           py::arg("stream") = py::none())
      .def("prepare", &prepare, py::arg("function"), py::arg("x"), py::arg("out") = py::none(), py::kw_only(),
           py::arg("what") = py::none(), py::arg("op") = py::none(), py::arg("root") = py::none(), py::arg("stream") = py::none(),
           py::arg("rows") = py::none(), py::arg("recv_rows") = py::none(), py::arg("digest") = 0, py::arg("head") = false,
           py::arg("told") = py::none(), py::arg("out_argument") = "out")
      .def("part",
           [](const Group& group, int function, const py::tuple& shape) {
             return as_tuple(part_of(group.ready(), static_cast<Function>(function), shape_of(shape)));
           })
      .def("op", [](const Group&, int function,
                    py::handle op) { return static_cast<int>(checked_op(static_cast<Function>(function), op)); })
      .def(
          "reserve",
          [](Group& group, int count) { return failing(group.ready(), [&] { return reserved(group.ready(), count); }); },
          py::keep_alive<0, 1>())
      .def("send", &run_message<true>)
      .def("recv", &run_message<false>)
      .def("sendrecv", &send_and_receive)
      .def("start_send", &start_message<true>)
      .def("start_recv", &start_message<false>)
      .def(
          "add_link",
          [](Group& group, bool sends, int peer, int fd, const std::optional<SecretPair>& pair) {
            Descriptor owned(fd);
            const std::optional<Secret> secret = secret_of(pair);
            unlocked([&] { group.communicator->add_link(sends, peer, owned.release(), secret); });
          },
          py::arg("sends"), py::arg("peer"), py::arg("fd"), py::arg("secret") = py::none())
      .def("wanted_data_links", [](Group& group) { return group.founded.wanted_data_links(); })
      .def("expect_data_link", [](Group& group, int peer) { group.founded.expect_data_link(peer); })
      .def(
          "add_data_link",
          [](Group& group, int peer, int fd, const std::optional<SecretPair>& pair) {
            Descriptor owned(fd);
            const std::optional<Secret> secret = secret_of(pair);
            unlocked([&] { group.founded.add_data_link(peer, owned.release(), secret); });
          },
          py::arg("peer"), py::arg("fd"), py::arg("secret") = py::none())
      .def("expect_incoming", [](Group& group, int peer) { group.communicator->expect_incoming(peer); })
      .def("check", [](const Group& group, int peer) { group.communicator->check_peer(peer); })
      .def("abort", [](Group& group, const Error& verdict) { unlocked([&] { group.communicator->abort({verdict, true}); }); })
      .def("fail", [](Group& group, const Error& symptom) { unlocked([&] { group.communicator->abort({symptom, false}); }); })
      .def("left", [](Group& group, int rank) { group.communicator->left(rank); })
      .def("where",
           [](const Group& group) {
             const Where where = group.communicator->where();
             return py::make_tuple(where.number, where.inside, where.text);
           })
      .def("called",
           [](const Group& group, int64_t number) {
             const auto call = group.founded.recorder().find(static_cast<uint64_t>(number));
             return call ? call->text() : std::string();
           })
      .def("stuck", [](Group& group) { return group.communicator->stuck(); })
      .def("failure", [](const Group& group) { return group.communicator->failure(); })
      .def("notices", [](Group& group) { return group.founded.notices(); })
      .def("calls", &calls, py::arg("after") = 0)
      .def("last_look", [](Group& group) { group.communicator->last_look(); })
      .def("drain",
           [](Group& group) {
             auto cancelled = drain(group.ready());
             group.called([&] { group.communicator->drain(); });
             return cancelled;
           })
      .def("close",
           [](Group& group) {
             unlocked([&] { group.close(); });
             if (group.calls) forget_ended(*group.calls, group.calls->running.size());
           })
      .def("carried",
           [](const Group& group) {
             return py::dict(py::arg("arena") = group.founded.host().carried().arena.load(),
                             py::arg("mesh") = group.founded.host().carried().mesh.load());
           })
      .def("pulls", [](const Group& group) { return group.founded.host().arena() && group.founded.host().arena()->pulls(); })
      .def("partings", [](const Group& group) {
        return group.founded.host().arena() ? group.founded.host().arena()->partings() : uint64_t{0};
      });
}
