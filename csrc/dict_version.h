// SPDX-License-Identifier: BSD-3-Clause
// Whether a dict has changed since it was last looked at, without looking at its entries.
#pragma once

#include <torch/csrc/python_headers.h>

#include <cstdint>
#include <unordered_map>
#include <utility>

namespace torch_renaissance {

#if PY_VERSION_HEX >= 0x030C0000
// Python 3.12 tells a callback of each change of the dicts that it was asked to watch.
class DictVersions {
 public:
  // Null where Python has no more callbacks to give.
  static const uint64_t* add(PyObject* dict) {
    if (watcher() < 0) return nullptr;
    Record& record = records()[dict];
    if (record.users++ == 0 && PyDict_Watch(watcher(), dict) != 0) {
      PyErr_Clear();
      records().erase(dict);
      return nullptr;
    }
    return &record.version;
  }

  static void remove(PyObject* dict) {
    const auto at = records().find(dict);
    if (--at->second.users != 0) return;
    records().erase(at);
    if (PyDict_Unwatch(watcher(), dict) != 0) PyErr_Clear();
  }

  // Whether any of these dicts has changed since this was last asked with `seen`.
  static bool any_changed(uint64_t& seen) {
    return watcher() < 0 || std::exchange(seen, changes()) != changes();
  }

 private:
  struct Record {
    uint64_t version = 0;
    size_t users = 0;
  };

  static int watcher() {
    static const int id = [] {
      // https://github.com/python/cpython/issues/125608: 3.13.0 is silent about attributes.
      if (Py_Version >> 8 == 0x030D00) return -1;
      const int id = PyDict_AddWatcher(on_change);
      if (id < 0) PyErr_Clear();
      return id;
    }();
    return id;
  }

  static int on_change(PyDict_WatchEvent, PyObject* dict, PyObject*, PyObject*) {
    const auto at = records().find(dict);
    if (at != records().end()) ++at->second.version;
    ++changes();
    return 0;
  }

  static uint64_t& changes() {
    static uint64_t n = 1;
    return n;
  }

  // Never destroyed: Python may still change dicts when static objects are gone.
  static std::unordered_map<PyObject*, Record>& records() {
    static auto* const all = new std::unordered_map<PyObject*, Record>;
    return *all;
  }
};
#else
// Before, each dict has a number that is new after each change (PEP 509).
struct DictVersions {
  static const uint64_t* add(PyObject* dict) {
    return &reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
  }
  static void remove(PyObject*) {}
  static bool any_changed(uint64_t&) { return true; }
};
#endif

// A dict's version when it was last looked at. The dict must outlive it.
class DictVersion {
 public:
  explicit DictVersion(PyObject* dict) : dict_(dict), now_(DictVersions::add(dict)) { look(); }
  DictVersion(DictVersion&& other) noexcept
      : dict_(other.dict_), now_(std::exchange(other.now_, nullptr)), seen_(other.seen_) {}
  DictVersion& operator=(DictVersion&& other) noexcept {
    std::swap(dict_, other.dict_);
    std::swap(now_, other.now_);
    std::swap(seen_, other.seen_);
    return *this;
  }
  ~DictVersion() {
    if (now_ != nullptr) DictVersions::remove(dict_);
  }

  bool changed() const { return now_ == nullptr || *now_ != seen_; }
  void look() { seen_ = now_ == nullptr ? 0 : *now_; }

 private:
  PyObject* dict_;
  const uint64_t* now_;
  uint64_t seen_ = 0;
};

}  // namespace torch_renaissance
