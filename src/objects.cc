// Converts Python objects to bytes and back.
//
// Each value is a tag and what follows it. A count is one byte, or 255 and a u64. The functions `converted` and `make`, the
// methods of keys, and signal handlers may run any Python code. So the writer keeps what it writes alive and checks that no
// container changes. The reader creates a set or a dict when all its items have been read, and shows nobody a list or a tuple
// that does not have all items.
#include "src/objects.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "src/python.h"

namespace mscomm {

namespace {

static_assert(std::endian::native == std::endian::little);

// Each comment says what follows the tag.
enum class Tag : uint8_t {
  none,
  no,
  yes,
  int8,  // the integer, as in the next three
  int16,
  int32,
  int64,
  real,     // a double
  complex,  // two doubles
  text,     // the number of bytes, and UTF-8, in which surrogates are allowed
  bytes,    // the number of bytes, and the bytes
  list,     // the number of items, and the items, as in the next three
  tuple,
  set,
  frozenset,
  dict,   // the number of items, and the key and the value of each item
  made,   // the kind (u8), the number of values, and the values from which make() creates the object
  first,  // an object that may occur again: the objects with this tag are numbered in order, from 0
  again,  // the number of such an object
};

constexpr uint8_t long_count = 255;
constexpr uint32_t values_between_signals = 1 << 16;
constexpr size_t most_with_one_hash = 1000;

// depth: how many containers the container is in. An object of kind 0 counts as a container, and other kinds do not.
void check_depth(int depth, int kind = 0) {
  if (depth >= max_depth + (kind != 0))
    throw py::value_error("containers are nested more than " + std::to_string(max_depth) + " deep");
}

// Lets signal handlers run from time to time.
class Signals {
 public:
  void look() {
    if (++values_ % values_between_signals == 0) check_signals();
  }

 private:
  uint32_t values_ = 0;
};

class Writer {
 public:
  Writer(const py::function& converted, const py::type& fields)
      : converted_(converted), fields_(reinterpret_cast<const PyTypeObject*>(fields.ptr())) {}

  py::bytes bytes_of(const py::object& obj) {
    write(obj.ptr(), 0);
    resize(at_);
    return py::reinterpret_steal<py::bytes>(bytes_.release());
  }

 private:
  // An object that may occur again. It is kept alive, because otherwise another object could get its address.
  struct Met {
    py::object kept;
    size_t number;
    bool complete = false;
  };

  // repeated: whether the container of obj may be written several times.
  void write(PyObject* obj, int depth, bool repeated = false) {
    const PyTypeObject* const type = Py_TYPE(obj);
    if (type == &PyUnicode_Type) write_text(obj);
    else if (type == &PyFloat_Type) put(Tag::real, PyFloat_AS_DOUBLE(obj));
    else if (type == &PyLong_Type) write_integer(obj, depth);
    else if (obj == Py_None) put(Tag::none);
    else if (type == &PyBool_Type) put(obj == Py_True ? Tag::yes : Tag::no);
    else if (type == &PyBytes_Type) put_bytes(Tag::bytes, {PyBytes_AS_STRING(obj), size_t(PyBytes_GET_SIZE(obj))});
    else if (type == &PyComplex_Type) put(Tag::complex, std::array{PyComplex_RealAsDouble(obj), PyComplex_ImagAsDouble(obj)});
    else write_shareable(obj, depth, repeated);
  }

  void write_integer(PyObject* obj, int depth) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(obj, &overflow);
    if (overflow) write_made(call_python(converted_.ptr(), obj), depth);
    else if (value == static_cast<int8_t>(value)) put(Tag::int8, static_cast<int8_t>(value));
    else if (value == static_cast<int16_t>(value)) put(Tag::int16, static_cast<int16_t>(value));
    else if (value == static_cast<int32_t>(value)) put(Tag::int32, static_cast<int32_t>(value));
    else put(Tag::int64, value);
  }

  void write_text(PyObject* obj) {
    if (PyUnicode_IS_COMPACT_ASCII(obj))
      return put_bytes(Tag::text, {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(obj)), size_t(PyUnicode_GET_LENGTH(obj))});
    const py::object utf8 = taken(PyUnicode_AsEncodedString(obj, "utf-8", "surrogatepass"));
    put_bytes(Tag::text, {PyBytes_AS_STRING(utf8.ptr()), size_t(PyBytes_GET_SIZE(utf8.ptr()))});
  }

  // Writes an object that may contain others, or is of a type that this file does not know.
  void write_shareable(PyObject* given, int depth, bool repeated) {
    const bool once = !repeated && Py_REFCNT(given) == 1;  // only its container refers to it
    const auto obj = py::reinterpret_borrow<py::object>(given);
    if (const auto met = once ? met_.end() : met_.find(given); met != met_.end()) {
      if (!met->second.complete) throw py::value_error("it contains itself");
      put(Tag::again);
      return put_count(met->second.number);
    }
    const PyTypeObject* const type = Py_TYPE(given);
    if (type == &PyTuple_Type) return write_sequence(Tag::tuple, given, depth, !once);
    if (type == &PyFrozenSet_Type) return write_set(Tag::frozenset, obj, depth, !once);
    const bool is_dict = type == &PyDict_Type || type == fields_;
    const bool known = type == &PyList_Type || is_dict || type == &PySet_Type;
    const py::tuple parts = known ? py::tuple() : py::tuple(call_python(converted_.ptr(), given));
    Met* met = nullptr;
    if (!once && (known || parts[0].ptr() == Py_True)) {
      met = &met_.try_emplace(given, Met{obj, met_.size()}).first->second;
      put(Tag::first);
    }
    if (type == &PyList_Type) write_sequence(Tag::list, given, depth);
    else if (is_dict) write_dict(given, depth);
    else if (type == &PySet_Type) write_set(Tag::set, obj, depth);
    else write_made(parts, depth);
    if (met) met->complete = true;
  }

  void open(Tag tag, size_t items, int depth) {
    check_depth(depth);
    put(tag);
    put_count(items);
  }

  void write_sequence(Tag tag, PyObject* obj, int depth, bool repeated = false) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(obj);
    open(tag, size, depth);
    for (Py_ssize_t i = 0; i < size; i++) {
      signals_.look();
      check_size(PySequence_Fast_GET_SIZE(obj), size);
      write(PySequence_Fast_GET_ITEM(obj, i), depth + 1, repeated);
    }
    check_size(PySequence_Fast_GET_SIZE(obj), size);
  }

  void write_set(Tag tag, const py::object& obj, int depth, bool repeated = false) {
    const Py_ssize_t size = PySet_GET_SIZE(obj.ptr());
    open(tag, size, depth);
    Py_ssize_t elements = 0;
    for (const py::handle element : obj) {  // the iterator checks the size
      write(element.ptr(), depth + 1, repeated);
      signals_.look();
      elements++;
    }
    check_size(elements, size);
  }

  void write_dict(PyObject* obj, int depth) {
    const Py_ssize_t size = PyDict_GET_SIZE(obj);
    open(Tag::dict, size, depth);
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t items = 0;
    for (Py_ssize_t at = 0; PyDict_Next(obj, &at, &key, &value); items++) {
      auto kept = py::reinterpret_borrow<py::object>(value);  // because write(key) may change the dict
      write(key, depth + 1);
      if (Py_REFCNT(value) == 1) changed();
      kept = {};  // write() looks at the number of references
      write(value, depth + 1);
      signals_.look();
      check_size(PyDict_GET_SIZE(obj), size);
    }
    check_size(items, size);
  }

  void write_made(const py::tuple& parts, int depth) {
    const auto kind = parts[1].cast<uint8_t>();
    check_depth(depth, kind);
    put(Tag::made, kind);
    put_count(parts.size() - 2);
    for (size_t i = 2; i < parts.size(); i++) write(PyTuple_GET_ITEM(parts.ptr(), i), kind == 0 ? depth + 1 : max_depth + 1);
  }

  static void check_size(Py_ssize_t now, Py_ssize_t before) {
    if (now != before) changed();
  }

  [[noreturn]] static void changed() {
    PyErr_SetString(PyExc_RuntimeError, "a container changed while it was converted to bytes");
    throw py::error_already_set();
  }

  void put(Tag tag) { *room(1) = static_cast<char>(tag); }

  template <typename Value>
  void put(Tag tag, const Value& value) {
    char* const to = room(1 + sizeof value);
    *to = static_cast<char>(tag);
    std::memcpy(to + 1, &value, sizeof value);
  }

  void put_count(uint64_t count) {
    if (count < long_count) *room(1) = static_cast<char>(count);
    else {
      *room(1) = static_cast<char>(long_count);
      std::memcpy(room(sizeof count), &count, sizeof count);
    }
  }

  void put_bytes(Tag tag, std::string_view bytes) {
    put(tag);
    put_count(bytes.size());
    std::memcpy(room(bytes.size()), bytes.data(), bytes.size());
  }

  // Returns where to write the next `bytes` bytes.
  char* room(size_t bytes) {
    if (size_ - at_ < bytes) resize(std::max(at_ + bytes, size_ + size_ / 2 + 64));
    at_ += bytes;
    return memory_ + (at_ - bytes);
  }

  void resize(size_t size) {
    PyObject* bytes = bytes_.release().ptr();
    if (!bytes) bytes = PyBytes_FromStringAndSize(nullptr, size);
    else _PyBytes_Resize(&bytes, size);
    bytes_ = taken(bytes);
    memory_ = PyBytes_AS_STRING(bytes);
    size_ = size;
  }

  const py::function& converted_;
  const PyTypeObject* const fields_;
  Signals signals_;
  std::unordered_map<PyObject*, Met> met_;
  py::object bytes_;
  char* memory_ = nullptr;
  size_t size_ = 0, at_ = 0;
};

class Reader {
 public:
  Reader(const py::buffer_info& data, const py::function& make, const py::function& may_be_shared)
      : make_(make),
        may_be_shared_(may_be_shared),
        at_(static_cast<const char*>(data.ptr)),
        end_(at_ + data.size * data.itemsize) {}

  py::object object() {
    py::object obj = read(0);
    if (at_ != end_) throw py::value_error("more bytes follow the object");
    return obj;
  }

 private:
  py::object read(int depth, bool numbered = false) {
    signals_.look();
    switch (const auto tag = next<Tag>()) {
      case Tag::none:
        return py::none();
      case Tag::no:
        return py::reinterpret_borrow<py::object>(Py_False);
      case Tag::yes:
        return py::reinterpret_borrow<py::object>(Py_True);
      case Tag::int8:
        return taken(PyLong_FromLong(next<int8_t>()));
      case Tag::int16:
        return taken(PyLong_FromLong(next<int16_t>()));
      case Tag::int32:
        return taken(PyLong_FromLong(next<int32_t>()));
      case Tag::int64:
        return taken(PyLong_FromLongLong(next<int64_t>()));
      case Tag::real:
        return taken(PyFloat_FromDouble(next<double>()));
      case Tag::complex: {
        const auto [real, imag] = next<std::array<double, 2>>();
        return taken(PyComplex_FromDoubles(real, imag));
      }
      case Tag::text:
        return text(next_bytes());
      case Tag::bytes: {
        const std::string_view bytes = next_bytes();
        return taken(PyBytes_FromStringAndSize(bytes.data(), bytes.size()));
      }
      case Tag::list:
        return sequence(PyList_New, open(depth), depth + 1);
      case Tag::tuple:
        return sequence(PyTuple_New, open(depth), depth + 1);
      case Tag::set:
        return set(PySet_New, depth);
      case Tag::frozenset:
        return set(PyFrozenSet_New, depth);
      case Tag::dict:
        return dict(depth);
      case Tag::made:
        return made(depth);
      case Tag::first:
        if (!numbered) return first(depth);
        break;
      case Tag::again:
        if (!numbered) return again();
        break;
      default:
        throw py::value_error("unknown tag " + std::to_string(static_cast<int>(tag)));
    }
    throw py::value_error("a shared object that is another shared object");
  }

  // Pushes the next items onto the stack. Returns the index of the first one.
  size_t push(size_t items, int depth) {
    const size_t begin = stack_.size();
    for (; items > 0; items--) {
      owed_--;
      stack_.push_back(read(depth));
    }
    return begin;
  }

  // Reads the number of items of a container, each of which consists of `values` values.
  size_t open(int depth, size_t values = 1) {
    check_depth(depth);
    return next_count(values);
  }

  py::object sequence(PyObject* (*create)(Py_ssize_t), size_t size, int depth) {
    py::object made = taken(create(size));
    if (size == 0) return made;
    PyObject_GC_UnTrack(made.ptr());  // so that gc.get_objects() does not show it before it is complete
    PyObject** const items = PySequence_Fast_ITEMS(made.ptr());
    for (size_t i = 0; i < size; i++) {
      owed_--;
      items[i] = read(depth).release().ptr();
    }
    PyObject_GC_Track(made.ptr());
    return made;
  }

  py::object set(PyObject* (*create)(PyObject*), int depth) {
    const size_t size = open(depth), begin = push(size, depth + 1);
    py::object made = taken(create(nullptr));
    check_hashes(begin, 1, "an element");
    for (size_t i = begin; i < stack_.size(); i++)
      if (stopping_at_exit([&] { return PySet_Add(made.ptr(), stack_[i].ptr()); }) != 0) refuse(stack_[i], "an element");
    if (static_cast<size_t>(PySet_GET_SIZE(made.ptr())) != size) throw py::value_error("an element occurs twice");
    stack_.resize(begin);
    return made;
  }

  py::object dict(int depth) {
    const size_t size = open(depth, 2), begin = push(2 * size, depth + 1);
    py::object made = taken(PyDict_New());
    check_hashes(begin, 2, "a key");
    for (size_t i = begin; i < stack_.size(); i += 2)
      if (stopping_at_exit([&] { return PyDict_SetItem(made.ptr(), stack_[i].ptr(), stack_[i + 1].ptr()); }) != 0)
        refuse(stack_[i], "a key");
    if (static_cast<size_t>(PyDict_GET_SIZE(made.ptr())) != size) throw py::value_error("a key occurs twice");
    stack_.resize(begin);
    return made;
  }

  py::object made(int depth) {
    const auto kind = next<uint8_t>();
    check_depth(depth, kind);
    return call_python(make_, kind, sequence(PyTuple_New, next_count(), kind == 0 ? depth + 1 : max_depth + 1));
  }

  py::object first(int depth) {
    const size_t number = shared_.size();
    shared_.emplace_back();
    return shared_[number] = read(depth, true);
  }

  py::object again() {
    const uint64_t number = next_count(0);
    if (number >= shared_.size() || !shared_[number])
      throw py::value_error("the shared object " + std::to_string(number) + " before it is complete");
    const py::object& obj = shared_[number];
    const bool known = PyList_CheckExact(obj.ptr()) || PyDict_CheckExact(obj.ptr()) || PySet_CheckExact(obj.ptr());
    if (!known && !call_python(may_be_shared_.ptr(), obj.ptr()).cast<bool>())
      throw py::value_error(std::string("a ") + Py_TYPE(obj.ptr())->tp_name + " that cannot be shared");
    return obj;
  }

  // Short texts often occur several times: as the keys of dicts, for example. They become one object.
  py::object text(std::string_view utf8) {
    const auto decoded = [&] { return taken(PyUnicode_DecodeUTF8(utf8.data(), utf8.size(), "surrogatepass")); };
    if (utf8.size() > longest_recent) return decoded();
    auto& [bytes, text] = recent_[std::hash<std::string_view>{}(utf8) % recent_.size()];
    if (!text || bytes != utf8) {
      text = decoded();
      bytes = utf8;
    }
    return text;
  }

  // Python's hash of an int is no secret. A set of n elements with the same hash takes a time of n squared to build.
  void check_hashes(size_t begin, size_t step, const char* what) const {
    if ((stack_.size() - begin) / step <= most_with_one_hash) return;
    std::vector<Py_hash_t> hashes;
    for (size_t i = begin; i < stack_.size(); i += step) {
      hashes.push_back(stopping_at_exit([&] { return PyObject_Hash(stack_[i].ptr()); }));
      if (hashes.back() == -1) refuse(stack_[i], what);
    }
    std::ranges::sort(hashes);
    for (size_t i = most_with_one_hash; i < hashes.size(); i++)
      if (hashes[i] == hashes[i - most_with_one_hash])
        throw py::value_error(what + (" has the same hash as " + std::to_string(most_with_one_hash)) + " others");
  }

  // Raises ValueError for a key or an element whose __hash__ or __eq__ has raised an exception.
  [[noreturn]] static void refuse(const py::object& obj, const char* what) {
    py::error_already_set error;
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw error;
    const py::str words = taken(stopping_at_exit([&] { return PyObject_Str(error.value().ptr()); }));
    const std::string why = Py_TYPE(error.value().ptr())->tp_name + (": " + std::string(words));
    const std::string text = std::string("a ") + Py_TYPE(obj.ptr())->tp_name + " cannot be " + what + ": " + why;
    py::raise_from(error, PyExc_ValueError, text.c_str());
    throw py::error_already_set();
  }

  // Takes the next bytes, unless they are needed for the values that the open containers still lack: each takes a byte or more.
  const char* take(uint64_t bytes) {
    if (bytes > end_ - at_ - owed_) throw py::value_error("the bytes end too early");
    return std::exchange(at_, at_ + bytes);
  }

  template <typename Value>
  Value next() {
    Value value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }

  // Reads how many items follow, each of which consists of `values` values.
  size_t next_count(size_t values = 1) {
    const auto few = next<uint8_t>();
    const uint64_t count = few == long_count ? next<uint64_t>() : few;
    if (values > 0 && count > (end_ - at_ - owed_) / values) throw py::value_error("the bytes end too early");
    owed_ += count * values;
    return count;
  }

  std::string_view next_bytes() {
    const size_t size = next_count(0);
    return {take(size), size};
  }

  static constexpr size_t longest_recent = 32;

  const py::function& make_;
  const py::function& may_be_shared_;
  Signals signals_;
  const char* at_;
  const char* const end_;
  size_t owed_ = 0;  // how many values the open containers still lack
  std::vector<py::object> stack_, shared_;
  std::array<std::pair<std::string_view, py::object>, 256> recent_;
};

}  // namespace

py::bytes pack_object(py::object obj, const py::function& converted, const py::type& fields) {
  return Writer(converted, fields).bytes_of(obj);
}

py::object unpack_object(const py::buffer& data, const py::function& make, const py::function& may_be_shared) {
  const py::buffer_info info = data.request();
  return Reader(info, make, may_be_shared).object();
}

}  // namespace mscomm
