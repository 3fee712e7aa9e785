// SPDX-License-Identifier: AGPL-3.0-or-later
// Failures in words, with what can be done about them.
import { make, makeButton } from "./parts.js";

const HINTS = {
  401: "Check the key in the settings, or leave it empty to ask anonymously.",
  429: "Wait a little, then try again.",
  502: "The horde or its workers failed. Trying again may help.",
  503: "Nobody can answer now. Choose another model, or try again later.",
  504: "Nobody answered in time. A shorter reply or another model may be quicker.",
};
const HINTS_BY_CODE = {
  context_length_exceeded: "Begin a new chat, delete an early exchange, or lower the longest reply in the settings.",
  insufficient_kudos: "Lower the longest reply in the settings, or earn kudos with a worker.",
  no_worker_available: "No worker serves this model now. Choose another one, or try again later.",
  nonconformant_reply: "Raise the longest reply in the settings, or choose another model.",
};

// `offers`: [{label, act}], as buttons behind the words.
export function showFailure(failure, offers) {
  const wait = failure.retryAfter ? `Try again in ${failure.retryAfter} s.` : (HINTS_BY_CODE[failure.code] ?? HINTS[failure.status]);
  const details = [wait, failure.code && `Code ${failure.code}.`, failure.requestId && `Request ${failure.requestId}.`];
  const buttons = offers.map(({ label, act }) => makeButton(label, act, "again"));
  return make(
    "div",
    { className: "error", role: "alert" },
    make("p", { text: failure.message }),
    make("p", { className: "hint", text: details.filter(Boolean).join(" ") }),
    make("div", { className: "actions" }, ...buttons),
  );
}
