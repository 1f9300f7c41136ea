// SPDX-License-Identifier: BSD-3-Clause
// What has changed of what a Watch remembers, as a person reads it.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "watch.h"

namespace torch_renaissance {

// The entry of a key, by the rule for values.
template <typename Iterator>
Iterator find_key(Iterator begin, Iterator end, PyObject* key) {
  return std::find_if(begin, end, [key](const auto& e) { return same_value(e.key, key); });
}

inline py::object Watch::difference() const {
  py::object text = py::none();
  every([&](const auto& record) {
    if (unchanged(record)) return true;
    text = py::str(difference(record));
    return false;
  });
  return text;
}

inline std::string Watch::subject(const Place& place) const {
  const std::string& name = names_[place.name];
  return place.key == nullptr ? name : name + ": " + shown(place.key);
}

inline std::string Watch::subject(const Table& table, PyObject* key) const {
  const std::string of = subject(table.place);
  return table.nested ? of + "[" + shown(key) + "]" : of + ": " + shown(key);
}

inline std::string difference_of(const std::string& subject, PyObject* was, PyObject* is) {
  const auto held = py::reinterpret_borrow<py::object>(is);
  if (tensor_in(was) != nullptr && tensor_in(is) != nullptr) return subject + " is another tensor";
  if (!is_plain(was) && Py_TYPE(was) == Py_TYPE(is)) {
    return subject + " is another " + type_name(Py_TYPE(is));
  }
  return subject + " was " + shown(was) + ", is " + shown(is);
}

// Where a value came or went, or changed; null: absent.
inline std::string difference_or_absent(const std::string& subject, PyObject* was, PyObject* is) {
  if (is == nullptr) return subject + " is gone";
  return was == nullptr ? subject + " is new" : difference_of(subject, was, is);
}

inline std::string Watch::difference(const Table& table) const {
  std::vector<Entry> now;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(table.dict, &at, &key, &value);) {
    if (!ignores(table, key)) now.push_back({key, value});
  }
  const auto begin = entries_.begin() + table.first, end = begin + table.count;
  for (auto was = begin; was != end; ++was) {
    const auto is = find_key(now.begin(), now.end(), was->key);
    if (is == now.end()) return subject(table, was->key) + " is gone";
    if (!same_value(was->value, is->value)) {
      return difference_of(subject(table, was->key), was->value, is->value);
    }
  }
  for (const Entry& is : now) {
    if (find_key(begin, end, is.key) != end) continue;
    return subject(table.place) + (table.nested ? " has a new entry " : ": new attribute ") +
           shown(is.key);
  }
  return subject(table.place) + (table.nested ? " has" : ":") + " its entries in another order";
}

inline std::string Watch::difference(const Item& item) const {
  PyObject* now = find_in(item.dict, item.entry.key);
  return difference_or_absent(subject(item.place), item.entry.value, now);
}

inline std::string Watch::difference(const Cell& cell) const {
  return difference_or_absent(subject(cell.place), cell.value, PyCell_GET(cell.cell));
}

inline std::string Watch::difference(const Tensor& tensor) const {
  const c10::TensorImpl* impl = tensor_in(tensor.object);
  const std::string of = subject(tensor.place);
  if (impl != tensor.impl) return of + " is another tensor";
  const TensorFacts now(impl);
  if (now.requires_grad() != tensor.facts.requires_grad()) {
    return of + ".requires_grad was " + (now.requires_grad() ? "False, is True" : "True, is False");
  }
  if (now.text() != tensor.facts.text()) {
    return of + " was " + tensor.facts.text() + ", is " + now.text();
  }
  if (!tensor.facts.same_form(impl)) return of + " is another kind of tensor";
  return of + (tensor.facts.same_address(impl) ? " has another value" : " has moved");
}

inline std::string Watch::difference(const Sized& sized) const {
  const Py_ssize_t now = length(sized.object);
  return subject(sized.place) + " has " + std::to_string(now) + (now == 1 ? " entry" : " entries") +
         ", had " + std::to_string(sized.size);
}

inline std::string Watch::difference(const List& list) const {
  uint32_t i = 0;  // its length is the same, or sized_ had said so
  while (same_value(values_[list.first + i], PyList_GET_ITEM(list.object, i))) ++i;
  return difference_of(subject(list.place) + "[" + std::to_string(i) + "]",
                       values_[list.first + i],
                       PyList_GET_ITEM(list.object, i));
}

}  // namespace torch_renaissance
