// A third-party shared library. It is opened when it is first needed, and never closed, because its threads and globals would not
// survive that.
#pragma once

#include <string>
#include <vector>

namespace mscomm {

// One place where the library may be.
struct Candidate {
  std::string origin;  // where the path comes from: "MSCOMM_NCCL_LIBRARY", "the loader's path"
  std::string path;    // may be only a file's name, which the loader then looks for
  // loaded: use this one only if the process has loaded it already. must: try no other place if this one cannot be opened.
  enum class Kind { usual, loaded, must } kind = Kind::usual;
};

class Dynlib {
 public:
  // Whether libraries that are loaded later can find this library's functions by name.
  enum class Names { own, everybodys };
  // Opens the first candidate that can be opened. Throws BackendUnavailable, with a list of what was tried, if none can.
  Dynlib(std::string name, const std::vector<Candidate>& candidates, Names names = Names::own);

  const std::string& path() const { return path_; }      // the file
  const std::string& origin() const { return origin_; }  // of the candidate that was opened
  // nullptr if the library has no such function.
  void* find(const char* symbol) const;
  // Sets the pointer; throws BackendUnavailable if the library has no such function.
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
