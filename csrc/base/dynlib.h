// A third-party shared library. It is opened when it is first needed. It is never closed, because its threads and global
// variables may be in use until the process ends.
#pragma once

#include <string>
#include <vector>

namespace mscomm {

// A place where the library may be.
struct Candidate {
  std::string origin;  // where the path comes from: "MSCOMM_NCCL_LIBRARY", "the loader's path"
  std::string path;    // may be only the name of a file, which the loader then looks for
  // usual: open the library, or try the next candidate. loaded: use the library only if the process has loaded it already. must:
  // if this library cannot be opened, try no other candidate.
  enum class Kind { usual, loaded, must } kind = Kind::usual;
};

class Dynlib {
 public:
  // Whether libraries that are loaded later can find this library's functions by name (everybodys) or not (own).
  enum class Names { own, everybodys };
  // Opens the first candidate that can be opened. If none can, throws BackendUnavailable with a list of what was tried.
  Dynlib(std::string name, const std::vector<Candidate>& candidates, Names names = Names::own);

  const std::string& path() const { return path_; }      // the file that was opened
  const std::string& origin() const { return origin_; }  // the origin of the candidate that was opened
  // Returns the address of the function, or nullptr if the library has no such function.
  void* find(const char* symbol) const;
  // Sets `function` to the address of the function; throws BackendUnavailable if the library has no such function.
  template <typename Function>
  void need(Function*& function, const char* symbol) const {
    function = reinterpret_cast<Function*>(required(symbol));
  }
  template <typename Function>
  void find(Function*& function, const char* symbol) const {
    function = reinterpret_cast<Function*>(find(symbol));
  }

 private:
  void* required(const char* symbol) const;

  std::string name_, path_, origin_;
  void* handle_ = nullptr;
};

}  // namespace mscomm
