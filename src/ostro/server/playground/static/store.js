// Stored state: settings in localStorage; the key and the open conversation in sessionStorage, for this tab only. Both
// storages may be blocked.

const SETTINGS = "ostro.playground";
const KEY = "ostro.key";
const OPEN = "ostro.open";

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

export const openConversation = () => read(() => sessionStorage.getItem(OPEN));

export const rememberOpen = (id) => read(() => sessionStorage.setItem(OPEN, id));

function read(access) {
  try {
    return access();
  } catch {
    return null;
  }
}
