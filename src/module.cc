// mscomm._core: converts, releases the GIL, calls. What it offers to Python is typed in python/mscomm/_core.pyi.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>

#include "algo/algorithm.h"
#include "backend/host.h"
#include "comm/communicator.h"
#include "transport/arena.h"

namespace py = pybind11;
using namespace mscomm;

namespace {

void raise(const Error& error) {
  if (error.kind == "ValueError") return PyErr_SetString(PyExc_ValueError, error.what());
  if (error.kind == "RuntimeError") return PyErr_SetString(PyExc_RuntimeError, error.what());
  if (error.kind == "MemoryError") return PyErr_SetString(PyExc_MemoryError, error.what());
  const py::object made =
      py::module_::import("mscomm.errors").attr("make")(error.kind, error.what(), error.ranks, error.waiting_for);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

void run_pending_signal_handlers() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A heap and the descriptor by which the peers map it, until close_fd.
std::pair<std::shared_ptr<Heap>, int> make_heap(size_t bytes) {
  const int fd = make_memory("mscomm-heap", bytes);
  try {
    return {std::make_shared<Heap>(Mapping(fd, bytes)), fd};
  } catch (...) {
    close(fd);
    throw;
  }
}

py::object allocate(const std::shared_ptr<Heap>& heap, size_t bytes) {
  void* memory = heap->allocate(bytes);
  if (!memory) return py::none();
  // The array keeps the heap alive, and the heap keeps the memory until the last view is gone.
  auto* owner = new std::pair(heap, memory);
  const py::capsule release(owner, [](void* pointer) {
    const std::unique_ptr<std::pair<std::shared_ptr<Heap>, void*>> owner(
        static_cast<std::pair<std::shared_ptr<Heap>, void*>*>(pointer));
    owner->first->release(owner->second);
  });
  return py::array_t<uint8_t>({bytes}, {size_t{1}}, static_cast<uint8_t*>(memory), release);
}

// The world, as Python builds it from the facts that the ranks exchanged.
struct Group {
  Recorder recorder;
  const HostBackend* host;
  std::unique_ptr<Communicator> communicator;

  Group(const std::string& name, int rank, std::vector<int> hosts, unsigned epoch, std::vector<std::string> names,
        const std::vector<std::string>& forced, std::vector<int> pidfds, std::shared_ptr<Heap> heap, int control_fd,
        const std::vector<int>& heap_fds, bool spin, const std::vector<int>& links, py::function notice) {
    const auto size = static_cast<int>(names.size());
    Layout layout{rank, size, std::move(hosts)};
    Forced algorithms;
    for (size_t i = 0; i < algorithms.size(); i++) algorithms[i] = forced[i];

    std::unique_ptr<Arena> arena;
    if (control_fd >= 0) {
      std::vector<Mapping> heaps;
      for (int fd : heap_fds) heaps.emplace_back(fd, check_memory(fd));
      arena = std::make_unique<Arena>(rank, size, Mapping(control_fd, check_memory(control_fd)), heap, std::move(heaps), spin);
    }
    std::unique_ptr<Mesh> mesh;
    if (!links.empty()) {
      std::vector<std::optional<Stream>> streams(names.size());
      for (size_t peer = 0; peer < links.size(); peer++)
        if (links[peer] >= 0) streams[peer].emplace(links[peer], names[peer]);
      mesh = std::make_unique<Mesh>(rank, epoch, std::move(streams), [this](uint64_t number) {
        const auto record = recorder.find(number);
        return record ? std::optional(record->signature) : std::nullopt;
      });
    }
    auto backend =
        std::make_unique<HostBackend>(std::move(layout), algorithms, std::move(arena), std::move(mesh), std::move(heap));
    host = backend.get();
    communicator = std::make_unique<Communicator>(
        name, rank, Communicator::Peers{std::move(names), std::move(pidfds)}, std::move(backend), recorder,
        Communicator::Hooks{run_pending_signal_handlers, [notice = std::move(notice)](const std::string& text) {
                              const py::gil_scoped_acquire gil;
                              notice(text);
                            }});
  }

  void run(int what, int dtype, int op, int root, const std::optional<py::array>& x, std::optional<py::array>& out,
           double timeout_s, uint64_t fused) {
    Signature signature;
    signature.fused = fused;
    signature.what = static_cast<Collective>(what);
    signature.dtype = static_cast<Dtype>(dtype);
    signature.op = static_cast<Op>(op);
    signature.root = root;
    uint64_t shape[max_dims];
    const auto dims = x ? static_cast<size_t>(x->ndim()) : 0;
    if (dims > max_dims) throw py::value_error("mscomm: arrays have at most 12 dimensions; reshape this one");
    for (size_t i = 0; i < dims; i++) shape[i] = static_cast<uint64_t>(x->shape(static_cast<py::ssize_t>(i)));
    const void* from = x ? x->data() : nullptr;
    void* to = out ? out->mutable_data() : nullptr;
    const py::gil_scoped_release unlocked;
    communicator->run(signature, {shape, dims}, from, to, timeout_s);
  }
};

py::object failure(const Group& group) {
  const auto failure = group.communicator->failure();
  if (!failure) return py::none();
  const Error& error = failure->error;
  return py::make_tuple(error.kind, std::string(error.what()), error.ranks, error.waiting_for, failure->verdict);
}

std::vector<py::dict> calls(const Group& group) {
  static constexpr const char* states[] = {"inside", "done", "failed"};
  std::vector<py::dict> list;
  for (const Record& record : group.recorder.all()) {
    py::dict entry;
    entry["number"] = record.signature.number;
    entry["call"] = record.signature.text();
    entry["state"] = states[static_cast<int>(record.state)];
    entry["began"] = record.began_s;
    entry["took"] = record.took_s;
    list.push_back(std::move(entry));
  }
  return list;
}

template <typename Names>
std::vector<std::string> as_strings(const Names& names) {
  return {names.begin(), names.end()};
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

  module.attr("version") = MSCOMM_VERSION;
  module.attr("collectives") = as_strings(collectives);
  module.attr("ops") = as_strings(ops);
  module.def("dtypes", [] {
    std::vector<std::string> names;
    for (const DtypeRow& row : dtypes) names.emplace_back(row.name);
    return names;
  });
  module.def("supports", [](int dtype, int op) { return supports(static_cast<Dtype>(dtype), static_cast<Op>(op)); });
  module.def("algorithms", [] {
    std::vector<py::tuple> rows;
    for (const Algorithm& row : algorithms())
      rows.push_back(
          py::make_tuple(std::string(name(row.what)), std::string(row.name), row.carrier == Carrier::arena ? "arena" : "mesh"));
    return rows;
  });
  module.def("select", [](int what, std::vector<int> hosts, const std::vector<std::string>& forced) {
    Forced names;
    for (size_t i = 0; i < names.size(); i++) names[i] = forced[i];
    const Layout layout{0, static_cast<int>(hosts.size()), std::move(hosts)};
    const Algorithm& row = select(static_cast<Collective>(what), layout, names);
    return py::make_tuple(std::string(row.name), row.carrier == Carrier::arena ? "arena" : "mesh");
  });
  module.def("make_control", [](int size) { return make_memory("mscomm-control", Arena::control_bytes(size)); });
  module.def("make_heap", &make_heap);

  py::class_<Heap, std::shared_ptr<Heap>>(module, "Heap").def("allocate", &allocate).def("in_use", &Heap::in_use);

  py::class_<Group>(module, "Group")
      .def(py::init<const std::string&, int, std::vector<int>, unsigned, std::vector<std::string>,
                    const std::vector<std::string>&, std::vector<int>, std::shared_ptr<Heap>, int, const std::vector<int>&, bool,
                    const std::vector<int>&, py::function>(),
           py::kw_only(), py::arg("name"), py::arg("rank"), py::arg("hosts"), py::arg("epoch"), py::arg("names"),
           py::arg("forced"), py::arg("pidfds"), py::arg("heap"), py::arg("control_fd"), py::arg("heap_fds"), py::arg("spin"),
           py::arg("links"), py::arg("notice"))
      .def("run", &Group::run)
      .def("abort",
           [](Group& group, const std::string& kind, std::vector<int> ranks, std::vector<int> waiting_for,
              const std::string& text) {
             const py::gil_scoped_release unlocked;
             group.communicator->abort({Error(kind, text, std::move(ranks), std::move(waiting_for)), true});
           })
      .def("left", [](Group& group, int rank) { group.communicator->left(rank); })
      .def("where",
           [](const Group& group) {
             const Where where = group.communicator->where();
             return py::make_tuple(where.number, where.inside, where.text);
           })
      .def("failure", &failure)
      .def("calls", &calls)
      .def("last_look", [](Group& group) { group.communicator->last_look(); })
      .def("close",
           [](Group& group) {
             const py::gil_scoped_release unlocked;
             group.communicator->close();
           })
      .def("chosen",
           [](const Group& group) {
             py::dict names;
             for (const auto& [what, algorithm] : group.host->chosen())
               names[py::str(std::string(what))] = std::string(algorithm);
             return names;
           })
      .def("lost_wakes",
           [](const Group& group) { return group.host->arena() ? group.host->arena()->lost_wakes() : uint64_t{0}; });
}
