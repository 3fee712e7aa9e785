// SPDX-License-Identifier: AGPL-3.0-or-later
// Images that somebody adds to a message: made small, and without what a camera writes into them.

export const MOST_IMAGES = 8; // of a message
const LARGEST_SIDE = 1280; // pixels; models see no more
const QUALITY = 0.85;

// The image of a file as a data URL. Raises when it is none.
export async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is see-through
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

// The image files of what was pasted or dropped.
export function listImageFiles(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}
