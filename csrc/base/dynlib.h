// A third-party shared library. It is opened when it is first needed, and never closed, because its threads and global variables
// may be in use until the process ends.
#pragma once

#include <string>
#include <vector>

namespace mscomm {

// A place where the library may be.
struct Candidate {
  std::string origin;  // where the path comes from, for example "MSCOMM_NCCL_LIBRARY" or "the loader's path"
  std::string path;    // may be just a file name, which the loader then searches for
  // usual: try to open the library; if that fails, try the next candidate. loaded: use the library only if the process has
  // already loaded it. must: if this library cannot be opened, do not try any later candidate.
  enum class Kind { usual, loaded, must } kind = Kind::usual;
};

class Dynlib {
 public:
  // everybodys: libraries that are loaded later can find this library's functions by name. own: they cannot.
  enum class Names { own, everybodys };
  // Opens the first candidate that can be opened. If there is none, throws BackendUnavailable with a list of what was tried.
  Dynlib(std::string name, const std::vector<Candidate>& candidates, Names names = Names::own);

  const std::string& path() const { return path_; }      // the file that was opened
  const std::string& origin() const { return origin_; }  // the origin of the candidate that was opened
  // The address of a function. It converts to any function pointer type.
  struct Symbol {
    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
    void* address = nullptr;
  };
  // find() and need() return the address of the function with this name. If the library has no such function, find() returns a
  // null address, and need() throws BackendUnavailable.
  Symbol find(const char* name) const;
  Symbol need(const char* name) const;

 private:
  std::string name_, path_, origin_;
  void* handle_ = nullptr;
};

}  // namespace mscomm
