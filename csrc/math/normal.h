// SPDX-License-Identifier: BSD-3-Clause
// Normal variates by inversion: Wichura's algorithm AS 241 (Applied Statistics 37, 1988), PPND16.
// Only + - * / sqrt and a logarithm made of them, all of which round alike on every device where
// the compiler fuses nothing (-ffp-contract=off, -fmad=false); libm's functions don't.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace torch_renaissance {

// The coefficients' polynomial, lowest power first.
template <int N>
TR_HOST_DEVICE double horner(const double (&coefficients)[N], double x) {
  double sum = coefficients[N - 1];
  for (int i = N - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// Natural logarithm of a positive, normal, finite x, to 2 ulp: x = 2^e m with sqrt(1/2) <= m <=
// sqrt(2), and log m = 2 atanh((m - 1) / (m + 1)) by its series, whose next term is below 2^-57.
TR_HOST_DEVICE double portable_log(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // Adding the distance of sqrt(1/2) from 1 carries into the exponent from sqrt(2) on.
  const uint64_t shifted = bits + (0x3FF0000000000000u - 0x3FE6A09E667F3BCDu);
  const int exponent = static_cast<int>(shifted >> 52) - 1023;
  bits -= static_cast<uint64_t>(static_cast<int64_t>(exponent)) << 52;
  double m;
  std::memcpy(&m, &bits, sizeof(m));
  const double series[] = {1.0 / 3,
                           1.0 / 5,
                           1.0 / 7,
                           1.0 / 9,
                           1.0 / 11,
                           1.0 / 13,
                           1.0 / 15,
                           1.0 / 17,
                           1.0 / 19,
                           1.0 / 21,
                           1.0 / 23};
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  const double log_m = 2.0 * s + 2.0 * s * (square * horner(series, square));
  // ln 2 in two parts, of which the first times an exponent is exact.
  const double high = 0x1.62e42fee00000p-1, low = 0x1.a39ef35793c76p-33;
  return exponent * high + (log_m + exponent * low);
}

// The z with P(Z < z) = 1/2 + q for standard normal Z and -1/2 < q < 1/2, to 6 ulp.
TR_HOST_DEVICE double normal_quantile(double q) {
  const double size = q < 0 ? -q : q;
  if (size <= 0.425) {
    const double a[] = {3.3871328727963666080,
                        1.3314166789178437745e2,
                        1.9715909503065514427e3,
                        1.3731693765509461125e4,
                        4.5921953931549871457e4,
                        6.7265770927008700853e4,
                        3.3430575583588128105e4,
                        2.5090809287301226727e3};
    const double b[] = {1.0,
                        4.2313330701600911252e1,
                        6.8718700749205790830e2,
                        5.3941960214247511077e3,
                        2.1213794301586595867e4,
                        3.9307895800092710610e4,
                        2.8729085735721942674e4,
                        5.2264952788528545610e3};
    const double r = 0.180625 - q * q;
    return q * (horner(a, r) / horner(b, r));
  }
  const double r = std::sqrt(-portable_log(0.5 - size));
  double z;
  if (r <= 5.0) {
    const double c[] = {1.42343711074968357734,
                        4.63033784615654529590,
                        5.76949722146069140550,
                        3.64784832476320460504,
                        1.27045825245236838258,
                        2.41780725177450611770e-1,
                        2.27238449892691845833e-2,
                        7.74545014278341407640e-4};
    const double d[] = {1.0,
                        2.05319162663775882187,
                        1.67638483018380384940,
                        6.89767334985100004550e-1,
                        1.48103976427480074590e-1,
                        1.51986665636164571966e-2,
                        5.47593808499534494600e-4,
                        1.05075007164441684324e-9};
    z = horner(c, r - 1.6) / horner(d, r - 1.6);
  } else {
    const double e[] = {6.65790464350110377720,
                        5.46378491116411436990,
                        1.78482653991729133580,
                        2.96560571828504891230e-1,
                        2.65321895265761230930e-2,
                        1.24266094738807843860e-3,
                        2.71155556874348757815e-5,
                        2.01033439929228813265e-7};
    const double f[] = {1.0,
                        5.99832206555887937690e-1,
                        1.36929880922735805310e-1,
                        1.48753612908506148525e-2,
                        7.86869131145613259100e-4,
                        1.84631831751005468180e-5,
                        1.42151175831644588870e-7,
                        2.04426310338993978564e-15};
    z = horner(e, r - 5.0) / horner(f, r - 5.0);
  }
  return q < 0 ? -z : z;
}

}  // namespace torch_renaissance
