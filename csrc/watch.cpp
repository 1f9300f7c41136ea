// SPDX-License-Identifier: BSD-3-Clause
// The checks that a replay makes, and their Python classes. A file of its own, since it compiles
// beside the others.
#include "watch.h"

#include <algorithm>

#include "signature.h"
#include "watch_difference.h"

namespace torch_renaissance {

namespace {

// Longer ones are watched by their length alone.
constexpr Py_ssize_t kLongestContents = 64;

// null: absent.
bool same_or_absent(PyObject* was, PyObject* is) {
  return was == is || (was != nullptr && is != nullptr && same_value(was, is));
}

bool is_container(PyObject* o) { return PyDict_Check(o) || PyList_Check(o) || PySet_Check(o); }

bool has_plain_contents(PyObject* o) {
  if (length(o) > kLongestContents || PySet_Check(o)) return false;
  if (PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(o); ++i) {
      if (!is_plain(PyList_GET_ITEM(o, i))) return false;
    }
    return true;
  }
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(o, &at, &key, &value);) {
    if (!is_plain(key) || !is_plain(value)) return false;
  }
  return true;
}

// A subclass (OrderedDict) keeps books of its own.
void set_entry(PyObject* dict, PyObject* key, PyObject* value) {
  const int failed = PyDict_CheckExact(dict) ? PyDict_SetItem(dict, key, value)
                                             : PyObject_SetItem(dict, key, value);
  if (failed != 0) throw py::error_already_set();
}

void delete_entry(PyObject* dict, PyObject* key) {
  const int failed =
      PyDict_CheckExact(dict) ? PyDict_DelItem(dict, key) : PyObject_DelItem(dict, key);
  if (failed != 0) throw py::error_already_set();
}

void replace(PyObject* list, PyObject* contents) {
  const int failed = PyList_SetSlice(list, 0, PY_SSIZE_T_MAX, contents);
  if (failed != 0) throw py::error_already_set();
}

void clear(PyObject* container) {
  if (PyList_Check(container)) {
    replace(container, nullptr);
  } else {
    py::handle(container).attr("clear")();
  }
}

}  // namespace

PyObject* Watch::hold(PyObject* o) {
  held_.push_back(py::reinterpret_borrow<py::object>(o));
  return o;
}

uint32_t Watch::add_name(const std::string& name) {
  names_.push_back(name);
  return static_cast<uint32_t>(names_.size() - 1);
}

void Watch::add_dict(const py::dict& dict, const std::string& name, const py::iterable& ignore) {
  if (py::isinstance<py::str>(ignore)) {
    throw py::type_error("ignore must be a set of keys, got the string " + shown(ignore.ptr()));
  }
  add_table(dict.ptr(), {add_name(name), nullptr}, false, ignore);
}

void Watch::add_item(const py::dict& dict, const py::str& key, const std::string& name) {
  PyObject* value = find_in(hold(dict.ptr()), hold(key.ptr()));
  const Place place{add_name(name), key.ptr()};
  items_.push_back({dict.ptr(), {key.ptr(), value}, place});
  if (value != nullptr) add_value(value, place);
  ++size_;
}

void Watch::add_cell(const py::object& cell, const std::string& name) {
  if (!PyCell_Check(cell.ptr())) {
    throw py::type_error(name + " must be a cell of a function's closure, got " +
                         shown(cell.ptr()));
  }
  PyObject* value = PyCell_GET(hold(cell.ptr()));
  const Place place{add_name(name), nullptr};
  cells_.push_back({cell.ptr(), value, place});
  if (value != nullptr) add_value(value, place);
  ++size_;
}

void Watch::add_object_tensor(const py::object& tensor, const std::string& name) {
  if (tensor_in(tensor.ptr()) == nullptr) {
    throw py::type_error(name + " must be a tensor, got " + shown(tensor.ptr()));
  }
  add_value(tensor.ptr(), {add_name(name), nullptr});
  ++size_;
}

void Watch::add_table(PyObject* dict, const Place& place, bool nested, const py::iterable& ignore) {
  Table table{hold(dict),
              static_cast<uint32_t>(entries_.size()),
              0,
              static_cast<uint32_t>(ignored_.size()),
              0,
              place,
              nested,
              DictVersion(dict)};
  for (const py::handle key : ignore) ignored_.push_back(hold(key.ptr()));
  table.n_ignored = static_cast<uint32_t>(ignored_.size()) - table.ignored;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    if (!ignores(table, key)) entries_.push_back({hold(key), hold(value)});
  }
  table.count = static_cast<uint32_t>(entries_.size()) - table.first;
  const uint32_t first = table.first, end = table.first + table.count;
  tables_.push_back(std::move(table));
  if (nested) return;
  size_ += end - first;
  for (uint32_t i = first; i < end; ++i) {
    add_value(entries_[i].value, {place.name, entries_[i].key});
  }
}

// What must be looked at beyond the value's identity.
void Watch::add_value(PyObject* value, const Place& place) {
  hold(value);
  const c10::TensorImpl* impl = tensor_in(value);
  if (impl == nullptr && !is_container(value)) return;
  if (!seen_.insert(value).second) return;
  if (impl != nullptr) {
    tensors_.push_back({value, impl, TensorFacts(impl), place});
    return;
  }
  (PyDict_Check(value) ? sized_dicts_ : sized_).push_back({value, length(value), place});
  if (PyDict_Check(value)) versions_.emplace_back(value);
  if (length(value) == 0 || !has_plain_contents(value)) return;
  if (PyDict_Check(value)) {
    add_table(value, place, true, py::tuple());
    return;
  }
  const List list{value,
                  static_cast<uint32_t>(values_.size()),
                  static_cast<uint32_t>(PyList_GET_SIZE(value)),
                  place};
  for (uint32_t i = 0; i < list.count; ++i) {
    values_.push_back(hold(PyList_GET_ITEM(value, i)));
  }
  lists_.push_back(list);
}

bool Watch::ignores(const Table& table, PyObject* key) const {
  for (uint32_t i = table.ignored; i < table.ignored + table.n_ignored; ++i) {
    if (same_value(ignored_[i], key)) return true;
  }
  return false;
}

bool Watch::unchanged(const Table& table) const {
  if (table.n_ignored == 0 && PyDict_GET_SIZE(table.dict) != table.count) return false;
  const Entry* expected = entries_.data() + table.first;
  const Entry* const end = expected + table.count;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(table.dict, &at, &key, &value);) {
    if (expected != end && same_value(expected->key, key)) {
      if (!same_value(expected->value, value)) return false;
      ++expected;
    } else if (!ignores(table, key)) {
      return false;
    }
  }
  return expected == end;
}

bool Watch::unchanged(const Item& item) const {
  return same_or_absent(item.entry.value, find_in(item.dict, item.entry.key));
}

bool Watch::unchanged(const Cell& cell) const {
  return same_or_absent(cell.value, PyCell_GET(cell.cell));
}

bool Watch::unchanged(const Tensor& tensor) const {
  const c10::TensorImpl* impl = tensor_in(tensor.object);
  return impl == tensor.impl && tensor.facts.same_form(impl) && tensor.facts.same_place(impl);
}

bool Watch::unchanged(const Sized& sized) const { return length(sized.object) == sized.size; }

bool Watch::unchanged(const List& list) const {
  if (PyList_GET_SIZE(list.object) != list.count) return false;
  for (uint32_t i = 0; i < list.count; ++i) {
    if (!same_value(values_[list.first + i], PyList_GET_ITEM(list.object, i))) return false;
  }
  return true;
}

bool Watch::check() const {
  const auto all = [this](const auto& records) {
    for (const auto& record : records) {
      if (!unchanged(record)) return false;
    }
    return true;
  };
  uint64_t changes = dict_changes_;
  if (DictVersions::any_changed(changes)) {
    for (const Table& table : tables_) {
      if (!table.version.changed()) continue;
      if (!unchanged(table)) return false;
      table.version.look();
    }
    if (!all(sized_dicts_)) return false;
    dict_changes_ = changes;
  }
  return all(items_) && all(cells_) && all(tensors_) && all(sized_) && all(lists_);
}

void Watch::restore() {
  for (const Table& table : tables_) restore(table);
  for (const List& list : lists_) {
    if (unchanged(list)) continue;
    py::list contents;
    for (uint32_t i = 0; i < list.count; ++i) contents.append(values_[list.first + i]);
    replace(list.object, contents.ptr());
  }
  for (const std::vector<Sized>* all : {&sized_dicts_, &sized_}) {
    for (const Sized& sized : *all) {
      if (sized.size == 0 && length(sized.object) != 0) clear(sized.object);
    }
  }
}

void Watch::restore(const Table& table) const {
  if (unchanged(table)) return;
  const auto begin = entries_.begin() + table.first, end = begin + table.count;
  std::vector<py::object> added;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(table.dict, &at, &key, &value);) {
    if (!ignores(table, key) && find_key(begin, end, key) == end) {
      added.push_back(py::reinterpret_borrow<py::object>(key));
    }
  }
  for (const py::object& key : added) delete_entry(table.dict, key.ptr());
  for (auto entry = begin; entry != end; ++entry) {
    PyObject* now = find_in(table.dict, entry->key);
    if (now == nullptr || !same_value(entry->value, now)) {
      set_entry(table.dict, entry->key, entry->value);
    }
  }
  if (unchanged(table)) return;
  for (auto entry = begin; entry != end; ++entry) {  // only the order is wrong
    delete_entry(table.dict, entry->key);
    set_entry(table.dict, entry->key, entry->value);
  }
}

// Empties itself first: what is let go may run Python code that asks this object.
void Watch::release() {
  Watch dropped;
  std::swap(dropped, *this);
}

int Watch::traverse(visitproc visit, void* arg) const {
  for (const py::object& o : held_) Py_VISIT(o.ptr());
  return 0;
}

void bind_watch(py::module_& m) {
  py::class_<Watch>(m, "Watch", collected<Watch>())
      .def(py::init<>())
      .def("add_dict",
           &Watch::add_dict,
           py::arg("d"),
           py::arg("name"),
           py::arg("ignore") = py::tuple())
      .def("add_item", &Watch::add_item, py::arg("d"), py::arg("key"), py::arg("name"))
      .def("add_cell", &Watch::add_cell, py::arg("cell"), py::arg("name"))
      .def("add_object_tensor", &Watch::add_object_tensor, py::arg("t"), py::arg("name"))
      .def("check", &Watch::check)
      .def("difference", py::overload_cast<>(&Watch::difference, py::const_))
      .def("restore", py::overload_cast<>(&Watch::restore))
      .def("release", &Watch::release)
      .def("__len__", &Watch::size);
  py::class_<Signature>(m, "Signature", collected<Signature>())
      .def(py::init<const py::tuple&>(), py::arg("args"))
      .def("fits", &Signature::fits, py::arg("args"))
      .def("__str__", &Signature::text);
}

}  // namespace torch_renaissance
