// SPDX-License-Identifier: AGPL-3.0-or-later
// Where a message is written, with its images.
import { MOST_IMAGES, listImageFiles, readImage } from "./images.js";
import { make, makeButton } from "./parts.js";

const find = (id) => document.getElementById(id);

export class Composer {
  // `acts`: {send(), stop(), isRunning(), seesImages()}
  constructor(acts) {
    this.acts = acts;
    this.field = find("message");
    this.images = [];
    this.field.addEventListener("input", () => this.#grow());
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      acts.send();
    });
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      acts.send();
    });
    find("attach").addEventListener("click", () => find("files").click());
    find("files").addEventListener("change", async (event) => {
      await this.addImages([...event.target.files]);
      event.target.value = "";
    });
    this.field.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    document.addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
    document.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
  }

  #take(event, transfer) {
    const files = listImageFiles(transfer);
    if (files.length || (event.type === "drop" && transfer?.files.length)) event.preventDefault(); // a dropped file would replace the page
    if (files.length) this.addImages(files);
  }

  async addImages(files) {
    this.tell("");
    if (!this.acts.seesImages()) {
      this.tell("This model sees no images.");
      return;
    }
    for (const file of files) {
      if (this.images.length >= MOST_IMAGES) {
        this.tell(`A message holds ${MOST_IMAGES} images at most.`);
        break;
      }
      try {
        this.images.push(await readImage(file));
      } catch {
        this.tell(`${file.name} is no image that this browser can read.`);
      }
    }
    this.#showImages();
  }

  // What was written, or null when there is nothing to send; the composer is empty then.
  take() {
    const asked = { text: this.field.value.trim(), images: this.images };
    if (!asked.text && !asked.images.length) return null;
    this.field.value = "";
    this.images = [];
    this.tell("");
    this.#showImages();
    this.#grow();
    return asked;
  }

  tell(text) {
    find("composer-facts").textContent = text;
  }

  showState() {
    const isRunning = this.acts.isRunning();
    const hadFocus = document.activeElement === find("stop") || document.activeElement === find("send");
    find("stop").hidden = !isRunning;
    find("send").hidden = isRunning;
    find("attach").hidden = !this.acts.seesImages();
    if (hadFocus) (isRunning ? find("stop") : this.field).focus();
  }

  #showImages() {
    const items = this.images.map((url, index) => {
      const remove = makeButton("✕", () => {
        this.images.splice(index, 1);
        this.#showImages();
        this.field.focus();
      }, "quiet");
      remove.setAttribute("aria-label", `Remove image ${index + 1}`);
      return make("li", {}, make("img", { src: url, alt: `Image ${index + 1}` }), remove);
    });
    find("attached").replaceChildren(...items);
  }

  #grow() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + 2}px`; // with its border; the style sheet sets the most
  }
}
