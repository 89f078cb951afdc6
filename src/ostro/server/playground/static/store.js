// What is remembered: settings in localStorage, the key in sessionStorage, for this tab alone. Both may be forbidden.

const SETTINGS = "ostro.playground";
const KEY = "ostro.key";

let settings = read(() => JSON.parse(localStorage.getItem(SETTINGS))) ?? {};
let key = read(() => sessionStorage.getItem(KEY)) ?? "";

export const setting = (name, otherwise) => settings[name] ?? otherwise;

export function remember(name, value) {
  settings = { ...settings, [name]: value };
  read(() => localStorage.setItem(SETTINGS, JSON.stringify(settings)));
}

export const currentKey = () => key;

export function useKey(value) {
  key = value;
  read(() => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)));
}

function read(access) {
  try {
    return access();
  } catch {
    return null;
  }
}
