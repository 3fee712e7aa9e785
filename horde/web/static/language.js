// SPDX-License-Identifier: AGPL-3.0-or-later
// Some systems name a language that is none to the browser's own formats, such as "en-US@posix".
// uPlot asks for one with it as it loads, and would not load.
(() => {
  try {
    new Intl.NumberFormat(navigator.language);
  } catch {
    const value = new Intl.NumberFormat().resolvedOptions().locale;
    Object.defineProperty(navigator, "language", { value });
  }
})();
