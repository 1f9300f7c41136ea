// SPDX-License-Identifier: BSD-3-Clause
// Remembers Python objects as they are and says whether they still are, in a few microseconds: a
// replayed CUDA graph runs no Python, so what its Python code read must not have changed.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "dict_version.h"
#include "values.h"

namespace torch_renaissance {

// A value is unchanged if it is the same object or, of plain values (None, numbers, strings,
// dtypes, devices and tuples of these), equal to it and of its type. Of a tensor the form and the
// address count as well (not its contents), of a list, dict or set the length, and of a list or
// dict of at most 64 plain values these values.
//
// An OrderedDict's order is that in which its keys came: move_to_end() isn't seen.
class Watch {
 public:
  Watch() = default;
  Watch(Watch&&) = default;
  Watch& operator=(Watch&&) = default;

  // Its keys, their order and their values. Whatever `ignore` names may come, go and change. An
  // object's __dict__ is the object's for good, unless another one is assigned.
  void add_dict(const py::dict& dict, const std::string& name, const py::iterable& ignore);
  // One entry, or that there is none.
  void add_item(const py::dict& dict, const py::str& key, const std::string& name);
  // What a closure's cell holds, or that it is empty.
  void add_cell(const py::object& cell, const std::string& name);
  void add_object_tensor(const py::object& tensor, const std::string& name);

  // Whether nothing has changed. Runs no Python code; a dict that wasn't touched since the last
  // call is not walked.
  bool check() const;

  // What has changed, as in "net.0: 'p' was 0.5, is 0.1", or None exactly where check() is true.
  py::object difference() const;

  // Gives dicts that were added whole their entries back, and lists, dicts and sets their contents
  // where these were recorded (none is a record too). Ignored entries and tensors stay as they are.
  void restore();

  // Forgets everything. All that was added is held until then (or until the garbage collector finds
  // that nobody else holds this object), so whoever outlives the model should call it.
  void release();

  size_t size() const { return size_; }
  int traverse(visitproc visit, void* arg) const;

 private:
  // Where a value was found: an entry of what was added under a name, or (key null) that itself.
  struct Place {
    uint32_t name;
    PyObject* key;
  };
  // An entry of a dict; value: null where there is none.
  struct Entry {
    PyObject *key, *value;
  };
  // A dict of entries_[first : first + count] besides ignored_[ignored : ignored + n_ignored].
  struct Table {
    PyObject* dict;
    uint32_t first, count, ignored, n_ignored;
    Place place;
    bool nested;  // itself the value that was found at `place`
    mutable DictVersion version;
  };
  struct Item {
    PyObject* dict;
    Entry entry;
    Place place;
  };
  struct Cell {
    PyObject *cell, *value;  // value: null where it is empty
    Place place;
  };
  struct Tensor {
    PyObject* object;
    const c10::TensorImpl* impl;  // swap_tensors() gives a Python object another one
    TensorFacts facts;
    Place place;
  };
  struct Sized {
    PyObject* object;
    Py_ssize_t size;
    Place place;
  };
  // A list of values_[first : first + count].
  struct List {
    PyObject* object;
    uint32_t first, count;
    Place place;
  };

  PyObject* hold(PyObject* o);
  uint32_t add_name(const std::string& name);
  void add_table(PyObject* dict, const Place& place, bool nested, const py::iterable& ignore);
  void add_value(PyObject* value, const Place& place);

  bool unchanged(const Table& table) const;
  bool unchanged(const Item& item) const;
  bool unchanged(const Cell& cell) const;
  bool unchanged(const Tensor& tensor) const;
  bool unchanged(const Sized& sized) const;
  bool unchanged(const List& list) const;
  bool ignores(const Table& table, PyObject* key) const;

  // Calls f with every record until it answers false.
  template <typename F>
  bool every(const F& f) const {
    const auto all = [&f](const auto& records) {
      for (const auto& record : records) {
        if (!f(record)) return false;
      }
      return true;
    };
    return all(tables_) && all(items_) && all(cells_) && all(tensors_) && all(sized_dicts_) &&
           all(sized_) && all(lists_);
  }

  std::string subject(const Place& place) const;
  std::string subject(const Table& table, PyObject* key) const;
  std::string difference(const Table& table) const;
  std::string difference(const Item& item) const;
  std::string difference(const Cell& cell) const;
  std::string difference(const Tensor& tensor) const;
  std::string difference(const Sized& sized) const;
  std::string difference(const List& list) const;

  void restore(const Table& table) const;

  // All objects below, so that no identity is used again. First, since versions_ needs its dicts.
  std::vector<py::object> held_;
  std::vector<std::string> names_;
  std::vector<Entry> entries_;
  std::vector<PyObject*> ignored_, values_;
  std::vector<Table> tables_;
  std::vector<Item> items_;
  std::vector<Cell> cells_;
  std::vector<Tensor> tensors_;
  std::vector<Sized> sized_dicts_, sized_;
  std::vector<DictVersion> versions_;  // of sized_dicts_, so that DictVersions knows of them
  std::vector<List> lists_;
  std::unordered_set<PyObject*> seen_;  // tensors and containers: each is looked at once
  mutable uint64_t dict_changes_ = 0;
  size_t size_ = 0;
};

}  // namespace torch_renaissance
