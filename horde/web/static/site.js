// SPDX-License-Identifier: AGPL-3.0-or-later
// What the pages of the API share: buttons that copy, this host's address in commands, and parts
// that stay live. Without JavaScript the pages say the same, as it was when they were loaded.

const LIVE_SECONDS = 15;

for (const element of document.querySelectorAll("[data-origin]")) {
  // The server may stand behind a proxy and know neither the scheme nor the name it is asked by.
  element.textContent = element.textContent.replaceAll(element.dataset.origin, location.origin);
}

for (const box of document.querySelectorAll(".copy")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const content = box.querySelector("pre");
    try {
      await navigator.clipboard.writeText(content.textContent);
      button.textContent = "Copied";
    } catch { // not allowed, or a page without TLS: select it for the keyboard
      getSelection().selectAllChildren(content);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  box.append(button);
}

function loadDocument(address) {
  // This way of asking parses the answer into a document whose scripts never run.
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("GET", address);
    request.responseType = "document";
    request.onload = () => (request.status === 200 ? resolve(request.response) : reject(request.status));
    request.onerror = reject;
    request.send();
  });
}

async function refresh(parts) {
  if (document.hidden) return;
  try {
    const fresh = await loadDocument(location.pathname + location.search);
    for (const part of parts) {
      const other = fresh.getElementById(part.id);
      if (other && !part.contains(document.activeElement)) {
        part.replaceChildren(...[...other.childNodes].map((node) => document.importNode(node, true)));
      }
    }
  } catch { // the next round may work
    return;
  }
}

const live = [...document.querySelectorAll("[data-live]")];
if (live.length) setInterval(() => refresh(live), LIVE_SECONDS * 1000);
