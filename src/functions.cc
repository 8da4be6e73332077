#include "src/functions.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "src/calls.h"
#include "src/python.h"

namespace mscomm {

namespace {

enum Slot : size_t { x, out, op, root, group, timeout, async_op, stream, dst, src, tag, status, slots };
constexpr std::array<const char*, slots> slot_names{"x",        "out",    "op",  "root", "group", "timeout",
                                                    "async_op", "stream", "dst", "src",  "tag",   "status"};

using Arguments = std::array<PyObject*, slots>;

// A function of the Python module. The entries and the Python objects in them live as long as the process.
struct Entry {
  std::string name, doc;
  PyMethodDef definition{};
  std::vector<std::pair<PyObject*, Slot>> parameters;  // the names are interned
  Py_ssize_t positional = 0;                           // how many parameters can be passed by position
  Arguments defaults{};                                // the default values; nullptr for a parameter without a default
  PyObject* model = nullptr;
};

// The collectives, in the order of the enum Collective, and then send and recv.
constexpr size_t send_number = collectives.size(), recv_number = send_number + 1;
std::array<Entry, recv_number + 1> entries;

struct Callee {
  py::object core;
  Calls* calls;
};
Callee& world = *new Callee{};

// Assigns the arguments of a Python call to slots. Returns false if the arguments do not match the parameters.
bool fit(const Entry& entry, PyObject* const* given, Py_ssize_t count, PyObject* names, Arguments& arguments) {
  if (count > entry.positional) return false;
  Arguments bound{};
  const auto begin = entry.parameters.begin(), end = entry.parameters.end();
  for (Py_ssize_t i = 0; i < count; i++) bound[begin[i].second] = given[i];
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    const py::handle name = PyTuple_GET_ITEM(names, i);
    auto found = std::find_if(begin, end, [name](const auto& one) { return one.first == name.ptr(); });
    if (found == end)  // the name may be equal without being the same object, for example because a program computed it
      found = std::find_if(begin, end, [name](const auto& one) { return PyUnicode_Compare(one.first, name.ptr()) == 0; });
    if (found == end || bound[found->second]) return false;
    bound[found->second] = given[count + i];
  }
  for (size_t i = 0; i < slots; i++) arguments[i] = bound[i] ? bound[i] : entry.defaults[i];
  for (const auto& [name, slot] : entry.parameters)
    if (!arguments[slot]) return false;
  return true;
}

// Returns the group that the `group` argument names. The Callee keeps the group alive during the call.
Callee callee(PyObject* given) {
  if (given == Py_None && world.core) return world;
  const py::object core = call_python(attribute_of("mscomm.job", "resolve"), py::handle(given)).attr("core");
  return {core, &core.cast<Group&>().ready()};
}

py::object object(PyObject* argument) { return py::reinterpret_borrow<py::object>(argument); }
// Returns null for None.
py::handle handle(PyObject* argument) { return argument == Py_None ? py::handle() : py::handle(argument); }

bool is_true(PyObject* argument) {
  const int whether = stopping_at_exit([&] { return PyObject_IsTrue(argument); });
  if (whether < 0) throw py::error_already_set();
  return whether != 0;
}

py::object run_collective(size_t number, const Arguments& arguments) {
  const Callee one = callee(arguments[group]);
  // The enum Function begins with the collectives, in the order of the enum Collective.
  const Wanted wanted{.function = static_cast<Function>(number),
                      .what = static_cast<Collective>(number),
                      .op = handle(arguments[op]),
                      .root = handle(arguments[root]),
                      .stream = handle(arguments[stream])};
  return call(*one.calls, wanted, object(arguments[x]), object(arguments[out]), handle(arguments[timeout]),
              is_true(arguments[async_op]));
}

// Returns the argument if it is an int from 0 to `last`.
std::optional<int64_t> number_in(PyObject* argument, int64_t last) {
  if (!PyLong_CheckExact(argument)) return std::nullopt;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(argument, &overflow);  // -1 if the integer is too large
  return number >= 0 && number <= last ? std::optional(number) : std::nullopt;
}

// Sends or receives a message. Returns null if this is left to the function in Python: the first message to a peer, a device
// array or a strided array, a status to fill, and wrong arguments.
py::object run_message(bool sends, const Arguments& arguments) {
  const Callee one = callee(arguments[group]);
  const Communicator& communicator = *one.calls->group->communicator;
  auto peer = number_in(arguments[sends ? dst : src], communicator.size() - 1);
  auto which = number_in(arguments[tag], last_tag);
  if (!sends && !peer && attribute_of("mscomm.messages", "ANY_SOURCE").ptr() == arguments[src]) peer = any_source;
  if (!sends && !which && attribute_of("mscomm.messages", "ANY_TAG").ptr() == arguments[tag]) which = any_tag;
  if (!peer || !which || arguments[status] != Py_None || (sends && !communicator.reaches(static_cast<int>(*peer)))) return {};
  auto array = plain_on_host(*one.calls, object(arguments[sends ? x : out]));
  if (!array || !(sends || array->writable)) return {};
  return message(*one.calls, sends, static_cast<int>(*peer), *which, *std::move(array), handle(arguments[timeout]),
                 is_true(arguments[async_op]));
}

PyObject* enter(size_t number, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  const Entry& entry = entries[number];
  Arguments arguments;
  const auto in_python = [&] { return stopping_at_exit([&] { return PyObject_Vectorcall(entry.model, given, count, names); }); };
  if (!fit(entry, given, count, names, arguments)) return in_python();
  return guarded([&] {
    if (number < send_number) return run_collective(number, arguments).release().ptr();
    py::object result = run_message(number == send_number, arguments);
    return result ? result.release().ptr() : in_python();
  });
}

template <size_t number>
PyObject* entered(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  return enter(number, given, count, names);
}

py::object entry_of(size_t number, const py::function& model, const std::string& signature) {
  static constexpr auto functions = []<size_t... numbers>(std::index_sequence<numbers...>) {
    return std::array{entered<numbers>...};
  }(std::make_index_sequence<entries.size()>());
  Entry& entry = entries.at(number);
  entry = {};
  entry.name = model.attr("__name__").cast<std::string>();
  // CPython reads a function's signature from the beginning of its docstring, if the docstring has the form
  // `name(parameters)\n--\n\ntext`.
  entry.doc = entry.name;
  entry.doc.append(signature).append("\n--\n\n").append(model.attr("__doc__").cast<std::string>());
  entry.definition = {entry.name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(functions[number])),
                      METH_FASTCALL | METH_KEYWORDS, entry.doc.c_str()};
  entry.model = py::object(model).release().ptr();
  entry.defaults.fill(Py_None);
  const py::object parameters = py::module_::import("inspect").attr("signature")(model).attr("parameters").attr("values")();
  for (const py::handle parameter : parameters) {
    const auto name = parameter.attr("name").cast<std::string>();
    const auto slot = std::find(slot_names.begin(), slot_names.end(), name) - slot_names.begin();
    if (static_cast<size_t>(slot) == slots) throw py::value_error(entry.name + ": unknown parameter " + name);
    entry.parameters.emplace_back(PyUnicode_InternFromString(name.c_str()), static_cast<Slot>(slot));
    const py::object absent = parameter.attr("empty"), value = parameter.attr("default");
    entry.defaults[slot] = value.is(absent) ? nullptr : py::object(value).release().ptr();
    if (!parameter.attr("kind").equal(parameter.attr("KEYWORD_ONLY"))) entry.positional++;
  }
  const py::object module = py::module_::import("sys").attr("modules")[model.attr("__module__")];
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&entry.definition, module.ptr(), model.attr("__module__").ptr()));
}

}  // namespace

py::object collective_function(Collective what, const py::function& model, const std::string& signature) {
  return entry_of(static_cast<size_t>(what), model, signature);
}

py::object message_function(bool sends, const py::function& model, const std::string& signature) {
  return entry_of(sends ? send_number : recv_number, model, signature);
}

void set_world(py::object core) {
  Calls* const calls = core.is_none() ? nullptr : &core.cast<Group&>().ready();
  const Callee before = std::exchange(world, {calls ? std::move(core) : py::object(), calls});
}

}  // namespace mscomm
